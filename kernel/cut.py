"""How a global batch is dealt to feeders and cut into microbatches."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

__all__ = ["Part", "cut", "share", "steps_per_epoch"]


class Part(NamedTuple):
    """A run of samples, counted from the start of its group."""

    start: int
    stop: int
    num_samples: int
    """`stop - start`; 0 for a part that only keeps its feeder busy."""


def share(num_samples: int, num_parts: int, index: int) -> tuple[int, int]:
    """Start and size of one of `num_parts` contiguous parts whose sizes differ by one at most."""
    size, num_larger = divmod(num_samples, num_parts)
    return index * size + min(index, num_larger), size + (index < num_larger)


@lru_cache(maxsize=64)
def cut(num_samples: int, micro_batch: int, index: int, num_feeders: int) -> tuple[Part, ...]:
    """The microbatches of one feeder in a group of `num_samples`. A feeder that has fewer samples
    than microbatches gets idle ones: one real sample, so that the forward can run, counted 0.
    """
    largest = share(num_samples, num_feeders, 0)[1]
    num_microbatches = -(-largest // micro_batch)
    start, size = share(num_samples, num_feeders, index)
    parts = []
    for number in range(num_microbatches):
        offset, length = share(size, num_microbatches, number)
        first = min(start + offset, num_samples - 1)
        parts.append(Part(first, first + max(length, 1), length))
    return tuple(parts)


def steps_per_epoch(num_samples: int, global_batch: int, drop_last: bool = False) -> int:
    """The number of groups in an epoch that is read from its start."""
    return num_samples // global_batch if drop_last else -(-num_samples // global_batch)

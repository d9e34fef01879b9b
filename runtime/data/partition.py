"""Partitions a global batch over readers, and splits it into microbatches."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ..kernel.batches import Position, split_evenly

__all__ = [
    "Part",
    "fitting_size",
    "named_samples",
    "pad_by_repeating",
    "partition",
    "steps_per_epoch",
]


class Part(NamedTuple):
    """A run of samples, counted from the start of its group."""

    start: int
    stop: int
    num_samples: int
    """`stop - start`; 0 for an idle microbatch, which only keeps its reader in step with others."""
    repeats: int = 1
    """The number of times that the samples are repeated in the batch, one round after the other."""


@lru_cache(maxsize=64)
def partition(num_samples: int, micro_batch: int, index: int, num_readers: int) -> tuple[Part, ...]:
    """Return the microbatches of one reader in a group of `num_samples`. A reader with fewer
    samples than microbatches gets idle ones: each has one real sample, so that the forward can run,
    and counts as 0 samples.
    """
    largest = split_evenly(num_samples, num_readers, 0)[1]
    num_microbatches = -(-largest // micro_batch)
    start, size = split_evenly(num_samples, num_readers, index)
    parts = []
    for number in range(num_microbatches):
        offset, length = split_evenly(size, num_microbatches, number)
        first = min(start + offset, num_samples - 1)
        parts.append(Part(first, first + max(length, 1), length))
    return tuple(parts)


@lru_cache(maxsize=64)
def pad_by_repeating(num_samples: int, size: int, index: int, num_readers: int) -> tuple[Part, ...]:
    """Partition as `partition` does, but with exactly `size` rows in every batch. The rest that
    does not fill a batch is split into parts whose lengths divide `size`, and each part is repeated
    until it fills a batch. A loss that is a sum over samples, divided by the repeats, is then exact
    without a mask.
    """
    start, own = split_evenly(num_samples, num_readers, index)
    lengths = _fill(own, size)
    ends = (0, num_readers - 1)
    num_microbatches = max(
        len(_fill(split_evenly(num_samples, num_readers, i)[1], size)) for i in ends
    )
    parts = []
    for length in lengths:
        parts.append(Part(start, start + length, length, size // length))
        start += length
    idle = min(start, num_samples - 1)
    parts += [Part(idle, idle + 1, 0, size)] * (num_microbatches - len(parts))
    return tuple(parts)


@lru_cache(maxsize=64)
def fitting_size(num_samples: int, micro_batch: int) -> int:
    """Return the smallest batch size, at most `micro_batch`, with which `pad_by_repeating` splits a
    reader's samples into the fewest batches.
    """
    sizes = range(1, min(num_samples, micro_batch) + 1)
    return min(sizes, key=lambda size: (len(_fill(num_samples, size)), size))


def _fill(num_samples: int, size: int) -> list[int]:
    lengths = []
    for divisor in (d for d in range(size, 0, -1) if size % d == 0):
        count, num_samples = divmod(num_samples, divisor)
        lengths += [divisor] * count
    return lengths


def steps_per_epoch(num_samples: int, global_batch: int, drop_last: bool = False) -> int:
    """Return the number of groups in an epoch that is read from its start."""
    return num_samples // global_batch if drop_last else -(-num_samples // global_batch)


def named_samples(position: Position, num_samples: int) -> str:
    """Describe samples by their places in the order of an epoch: `samples 16 to 23 of epoch 0`."""
    first, last = position.samples, position.samples + num_samples - 1
    named = f"sample {first}" if first == last else f"samples {first} to {last}"
    return f"{named} of epoch {position.epoch}"

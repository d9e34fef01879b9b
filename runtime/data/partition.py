"""Deals a global batch to readers and cuts it into microbatches."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from ..kernel.batches import split_evenly

__all__ = ["Part", "fitting_size", "pad_by_repeating", "partition", "steps_left", "steps_per_epoch"]


class Part(NamedTuple):
    """A run of samples, counted from the start of its group."""

    start: int
    stop: int
    num_samples: int
    """`stop - start`; 0 for a part that only keeps its reader busy."""
    repeats: int = 1
    """The number of times that its samples stand in the batch, one round after the other."""


@lru_cache(maxsize=64)
def partition(num_samples: int, micro_batch: int, index: int, num_readers: int) -> tuple[Part, ...]:
    """The microbatches of one reader in a group of `num_samples`. A reader that has fewer samples
    than microbatches gets idle ones: one real sample, so that the forward can run, counted 0.
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
    """`cut`, where every batch must have exactly `size` rows. What does not fill a batch is cut
    into parts whose lengths divide `size`, each repeated until it does: a loss that is a sum over
    samples, divided by the repeats, is exactly theirs, without a mask.
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
    """The batch size, at most `micro_batch`, with which `pad_by_repeating` cuts a reader's
    samples into the fewest batches; the smallest of these.
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
    """The number of groups in an epoch that is read from its start."""
    return num_samples // global_batch if drop_last else -(-num_samples // global_batch)


def steps_left(
    length: int, taken: int, left: int, global_batch: int, drop_last: bool, part: float
) -> int:
    """The number of groups in what is `left` of an epoch, or of that part of it, of which `taken`
    of its `length` were consumed.
    """
    steps = steps_per_epoch(left, global_batch, drop_last)
    if part == 1:
        return steps
    wanted = ceil(part * steps_per_epoch(length, global_batch, drop_last))
    return min(steps, max(0, wanted - ceil(taken / global_batch)))

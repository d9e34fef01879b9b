"""The data that the loop trains on: groups of microbatches, and positions in the data.

A *group* is this reader's part of the samples of one update; a *position* is the place in the
data that training has reached, from which a run can resume."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from .recipe import Batch

__all__ = [
    "ENDLESS",
    "Group",
    "Groups",
    "Microbatch",
    "Position",
    "items_of",
    "split_evenly",
]

ENDLESS = sys.maxsize
"""A number of steps: until the data ends."""


class Position(NamedTuple):
    """A place in the data: `samples` of the order of `epoch` were consumed."""

    epoch: int = 0
    samples: int = 0
    """Samples read so far; of prebatched data, the batches of all readers."""
    state: Mapping[str, Any] | None = None
    """The stream's own state at this place; JSON types."""


class Group(NamedTuple):
    """One step's samples, and this reader's part of them. Take all `microbatches` before asking for
    the next group: each is fetched when it is asked for."""

    position: Position
    next: Position
    """Position at which the next group starts."""
    num_samples: int
    """Number of samples over all readers."""
    num_microbatches: int
    """The same on every rank."""
    microbatches: Iterator[Microbatch]
    num_items: float | None = None
    """This reader's, if the data counts them; None: the kernel does."""
    digest: int = 0
    """Checksum of samples that all readers have read, where they read the same."""


class Microbatch(NamedTuple):
    """The batch of one forward of one reader."""

    batch: Batch
    num_samples: int
    """0: idle. The batch is real, so that the forward can run, and counts for nothing."""
    offset: int
    """Index of its first sample, in the order of the epoch."""
    repeats: int = 1
    """Rounds of its samples in the batch; its items and losses count as many times."""
    seconds: tuple[float, float] = (0.0, 0.0)
    """Seconds of fetching its samples, and of collating them, where they were measured."""
    num_items: float | None = None
    """Its items, if the data counts them and the recipe does not; None: its samples."""


class Groups(Protocol):
    """Data in the order of training; a `Loader` is one."""

    def groups(self, start: Position, num_steps: int) -> Iterator[Group]:
        """Yield at most the next `num_steps` groups. May end earlier, at the end of an epoch: the
        caller calls it again from the new position, until a call yields none, and closes each."""


def items_of(part: Microbatch, count: Callable[[Batch], int] | None) -> float:
    """The number of items in a microbatch, each once. `count`: the recipe's, if it has one."""
    if count is None or not part.num_samples:
        return float(part.num_samples) if part.num_items is None else part.num_items
    return count(part.batch) / part.repeats


def split_evenly(num_samples: int, num_parts: int, index: int) -> tuple[int, int]:
    """Start and size of one of `num_parts` contiguous parts whose sizes differ by one at most."""
    size, num_larger = divmod(num_samples, num_parts)
    return index * size + min(index, num_larger), size + (index < num_larger)

"""The data that the loop trains on: groups of microbatches, and positions in the data.

A *group* is this reader's part of the samples of one update; a *position* says where in the data
training stands, so that a run can resume there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from .errors import DataError
from .recipe import Batch

__all__ = ["ENDLESS", "LARGEST", "Group", "Groups", "Microbatch", "Position", "split_evenly"]

LARGEST = 1 << 62
"""What is counted stays below; nobody lives to see more."""
ENDLESS = sys.maxsize
"""A number of steps: until the data ends."""


class Position(NamedTuple):
    """A place in the data: `samples` of the order of `epoch` were consumed."""

    epoch: int = 0
    samples: int = 0
    """Of prebatched data: the batches of all readers."""
    state: Mapping[str, Any] | None = None
    """A stream's own, there; JSON types."""

    def to_json(self) -> dict[str, Any]:
        """For the manifest of a checkpoint."""
        state = {} if self.state is None else {"state": dict(self.state)}
        return {"epoch": self.epoch, "samples": self.samples, **state}

    @classmethod
    def from_json(cls, value: Any) -> Position:
        """Raises `DataError` for anything but what `to_json` returns."""
        if not isinstance(value, Mapping):
            raise DataError(f"not a data position: {value!r:.200}")
        counts = [value.get("epoch"), value.get("samples")]
        if (
            not all(type(count) is int and 0 <= count < LARGEST for count in counts)
            or value.keys() - {"epoch", "samples", "state"}
            or not isinstance(value.get("state", {}), Mapping)
        ):
            raise DataError(f"not a data position: {dict(value)!r:.200}")
        return cls(**value)


class Group(NamedTuple):
    """One step's samples, and this reader's part of them.

    Take all `microbatches` before asking for the next group: each is fetched when it is asked for.
    """

    position: Position
    next: Position
    """Where to start after this group."""
    num_samples: int
    """Over all readers."""
    num_microbatches: int
    """The same on every rank."""
    microbatches: Iterator[Microbatch]
    num_items: float | None = None
    """This reader's, if the data counts them; None: the kernel does."""


class Microbatch(NamedTuple):
    """The batch of one forward of one reader."""

    batch: Batch
    num_samples: int
    """0: idle. The batch is real, so that the forward can run, and counts for nothing."""
    offset: int
    """Of its first sample, in the order of the epoch."""
    repeats: int = 1
    """How often its samples stand in the batch, in rounds: so often count its items and losses."""


class Groups(Protocol):
    """Data in the order of training; a `Loader` is one."""

    def groups(self, start: Position, num_steps: int) -> Iterator[Group]:
        """At most the next `num_steps` groups. May end earlier, at the end of an epoch: it is
        called again from there, until a call gives none. The generator is closed after use."""
        ...


def split_evenly(num_samples: int, num_parts: int, index: int) -> tuple[int, int]:
    """Start and size of one of `num_parts` contiguous parts whose sizes differ by one at most."""
    size, num_larger = divmod(num_samples, num_parts)
    return index * size + min(index, num_larger), size + (index < num_larger)

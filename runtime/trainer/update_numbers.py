"""The number of an update, which engines need for random numbers that an optimizer draws."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ..kernel.loop import TrainLoop

__all__ = ["NumbersUpdates", "number_next_update"]


@runtime_checkable
class NumbersUpdates(Protocol):
    """An engine on which an optimizer may draw random numbers. Within an update its generators
    depend on the run's seed, on the number of the update, and on the part of the weights that the
    rank updates. Copies of weights stay equal, and a resumed run draws what it would have drawn.
    """

    def number_update(self, number: int, /) -> object:
        """Give the next `update` its number in the run; the first is 1. Called by all ranks."""


def number_next_update(loop: TrainLoop) -> None:
    """Give the engine the number of the loop's next update, if it wants one."""
    # each step asks, and a protocol takes longer to compare than the update of a small model
    number_update = getattr(loop.engine, "number_update", None)
    if number_update is not None:
        number_update(loop.progress.step + 1)

"""The number of an update, which engines need for random numbers that an optimizer draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from ..kernel.contract import Engine
from ..kernel.loop import TrainLoop

__all__ = ["NumbersUpdates", "numbering"]


@runtime_checkable
class NumbersUpdates(Protocol):
    """An engine on which an optimizer may draw random numbers. Within an update its generators
    depend on the run's seed, on the number of the update, and on the part of the weights that the
    rank updates. Copies of weights stay equal, and a resumed run draws what it would have drawn.
    """

    def number_update(self, number: int, /) -> object:
        """Give the next `update` its number in the run; the first is 1. Called by all ranks."""


def numbering(engine: Engine) -> Callable[[TrainLoop], None]:
    """Return a function that gives the engine the number of a loop's next update, if it wants
    one."""
    if not isinstance(engine, NumbersUpdates):
        return lambda loop: None
    number_update = engine.number_update

    def number_next_update(loop: TrainLoop) -> None:
        number_update(loop.progress.step + 1)

    return number_next_update

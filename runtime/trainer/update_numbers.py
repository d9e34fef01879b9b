"""The number of an update, which engines need for random numbers that an optimizer draws."""

from __future__ import annotations

from collections.abc import Callable

from ..kernel.contract import Engine
from ..kernel.loop import TrainLoop
from ..kernel.optional import NumbersUpdates

__all__ = ["numbering"]


def numbering(engine: Engine) -> Callable[[TrainLoop], None]:
    """Return a function that gives the engine the number of a loop's next update, if it wants
    one."""
    if not isinstance(engine, NumbersUpdates):
        return lambda loop: None
    number_update = engine.number_update

    def number_next_update(loop: TrainLoop) -> None:
        number_update(loop.progress.step + 1)

    return number_next_update

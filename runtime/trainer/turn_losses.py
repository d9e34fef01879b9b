"""The losses since the last log: of each turn, if updates take turns, and of each part of the
loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..kernel.contract import Session
from ..kernel.errors import CheckpointDamaged
from .loop_state import losses_from_json, losses_to_json
from .loss_parts import LossParts

__all__ = ["TurnLosses"]


class TurnLosses:
    """Adds up the losses of one rank, which stay on the device until they are read. All ranks call
    every method in the same order.

    `turn_of(number)` returns the name of an update's turn; None if updates do not take turns.
    `parts`: the parts of the loss, if it has any. Without either nothing is kept.
    """

    def __init__(
        self,
        turn_of: Callable[[int], str] | None,
        session: Session,
        parts: LossParts | None = None,
    ) -> None:
        self.turn_of, self.parts, self.session = turn_of, parts, session
        self.keeps = turn_of is not None or parts is not None
        self._losses: dict[str, Any] = {}
        self._steps: dict[str, int] = {}

    def add(self, number: int, loss: Tensor) -> None:
        """Add one more step, without waiting for the device."""
        if not self.keeps:
            return
        found = {} if self.turn_of is None else {self.turn_of(number): loss}
        found |= {} if self.parts is None else self.parts.take()
        for name, value in found.items():
            self._losses[name] = self._losses.get(name, 0.0) + value
            self._steps[name] = self._steps.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        """Return the mean of each turn and part since the last log, over steps and ranks. Waits for
        the device."""
        if not self._losses:
            return {}
        device = self.session.world.device
        losses = [torch.as_tensor(loss).to(device).float() for loss in self._losses.values()]
        sums = (self.session.reduce(torch.stack(losses)) / self.session.world.num_feeders).tolist()
        return {name: sums[i] / self._steps[name] for i, name in enumerate(self._losses)}

    def start_window(self) -> None:
        """Start the window of the next log."""
        self._losses, self._steps = {}, {}

    # --- saving and resuming --------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the sums, so that the first log after a resume covers the steps before it, too."""
        return {
            name: {"steps": self._steps[name], "losses": losses_to_json(loss, self.session)}
            for name, loss in self._losses.items()
        }

    def restore(self, value: Mapping[str, Any] | None, where: str = "the checkpoint") -> None:
        """Restore the result of `to_json`, at any world size. Raises `CheckpointDamaged`, naming
        `where`, for anything else."""
        self.start_window()
        if not value or not self.keeps:
            return
        try:
            for name, kept in value.items():
                self._losses[name] = losses_from_json(kept["losses"], self.session.world)
                self._steps[name] = max(1, int(kept["steps"]))
        except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise CheckpointDamaged(f"{where}: its turns are malformed: {error!r}") from error

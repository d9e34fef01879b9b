"""The losses since the last log, apart by whose turn each update was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..kernel.contract import Session
from ..kernel.errors import CheckpointDamaged
from ..kernel.progress import losses_from_json, losses_to_json

__all__ = ["TurnLosses"]


class TurnLosses:
    """Adds up the losses of one rank, which stay on the device until they are asked for. Every
    method is called by all ranks in the same order.

    `turn_of(number)`: the name of the turn of that update; None where all updates are alike, and
    nothing is kept.
    """

    def __init__(self, turn_of: Callable[[int], str] | None, session: Session) -> None:
        self.turn_of, self.session = turn_of, session
        self._losses: dict[str, Any] = {}
        self._steps: dict[str, int] = {}

    def add(self, number: int, loss: Tensor) -> None:
        """One more step; waits for nothing."""
        if self.turn_of is None:
            return
        name = self.turn_of(number)
        self._losses[name] = self._losses.get(name, 0.0) + loss
        self._steps[name] = self._steps.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        """The mean loss of each turn that there was, over steps and ranks. Waits for the device."""
        if not self._losses:
            return {}
        device = self.session.world.device
        losses = [torch.as_tensor(loss).to(device).float() for loss in self._losses.values()]
        sums = (self.session.reduce(torch.stack(losses)) / self.session.world.num_feeders).tolist()
        return {name: sums[i] / self._steps[name] for i, name in enumerate(self._losses)}

    def start_window(self) -> None:
        """From here on are the steps of the next log."""
        self._losses, self._steps = {}, {}

    # --- saving and resuming --------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """So that the first log after a resume covers the steps before it, too."""
        return {
            name: {"steps": self._steps[name], "losses": losses_to_json(loss, self.session)}
            for name, loss in self._losses.items()
        }

    def restore(self, value: Mapping[str, Any] | None, where: str = "the checkpoint") -> None:
        """Take over what `to_json` returned, at any world size. Raises `CheckpointDamaged`, naming
        `where`, for anything else."""
        self.start_window()
        if not value or self.turn_of is None:
            return
        try:
            for name, kept in value.items():
                self._losses[name] = losses_from_json(kept["losses"], self.session.world)
                self._steps[name] = max(1, int(kept["steps"]))
        except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise CheckpointDamaged(f"{where}: its turns are malformed: {error!r}") from error

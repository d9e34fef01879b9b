"""The progress of a run, and its steps since the last log."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .batches import Position
from .contract import Session

__all__ = ["Progress", "Window"]


@dataclass
class Progress:
    """The counts that a checkpoint holds of the loop. They are over all ranks."""

    step: int = 0
    """Updates tried."""
    applied: int = 0
    """Updates that changed the weights: the clock of the learning rate."""
    skipped: int = 0
    items: int = 0
    samples: int = 0
    position: Position = field(default_factory=Position)


class Window:
    """The steps since the last log. Losses stay on the device until they are asked for."""

    def __init__(self, progress: Progress) -> None:
        self.first_step = self._timed_step = progress.step
        self._items, self._samples = progress.items, progress.samples
        self.loss_sum: Any = 0.0
        """This feeder's losses of these steps, added up; on the device, or 0.0 before the first."""
        self._grad_norm: Any = math.nan
        self.empty_steps = 0
        """Steps that had no items: they added 0, and are left out of the mean loss."""
        self._since = time.perf_counter()

    def has_grown(self, progress: Progress) -> bool:
        """True if there is a step that no log has covered."""
        return progress.step > self._timed_step

    def add(self, loss: Tensor, grad_norm: Tensor) -> None:
        """One more step; waits for nothing."""
        self.loss_sum = self.loss_sum + loss
        self._grad_norm = grad_norm

    def leave_out(self, seconds: float) -> None:
        """Time that was not spent on training."""
        self._since += seconds

    def figures(self, progress: Progress, session: Session) -> dict[str, float]:
        """Means over the window, by the names that `Logged` has. Waits for the device."""
        steps = progress.step - self.first_step - self.empty_steps
        timed_steps = progress.step - self._timed_step
        loss = math.nan
        if steps:
            loss = float(session.reduce(self.loss_sum)) / session.world.num_feeders / steps
        grad_norm = float(self._grad_norm)
        seconds = time.perf_counter() - self._since  # after the line that waits
        return {
            "loss": loss,
            "grad_norm": grad_norm,
            "step_seconds": seconds / timed_steps,
            "items_per_second": (progress.items - self._items) / seconds,
            "samples_per_second": (progress.samples - self._samples) / seconds,
        }

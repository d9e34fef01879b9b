"""The progress of a run, and its steps since the last log."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from .batches import LARGEST, Position
from .contract import Session, World
from .errors import CheckpointDamaged, DataError

__all__ = ["Progress", "Window", "losses_from_json", "losses_to_json"]


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

    def to_json(self) -> dict[str, Any]:
        """A mapping that `from_json` takes."""
        return {**asdict(self), "position": self.position.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str = "the checkpoint") -> Progress:
        """Raises `CheckpointDamaged`, naming `where`, for anything but what `to_json` returns."""
        try:
            position = Position.from_json(value["position"])
            counts = {name: value[name] for name in asdict(cls()) if name != "position"}
        except (KeyError, DataError) as error:
            raise CheckpointDamaged(f"{where}: its progress is malformed: {error!r}") from error
        if not all(type(count) is int and 0 <= count < LARGEST for count in counts.values()):
            raise CheckpointDamaged(f"{where}: its counts must be whole numbers: {counts!r:.200}")
        if max(counts["applied"], counts["skipped"]) > counts["step"]:
            raise CheckpointDamaged(f"{where}: more updates than steps: {counts!r:.200}")
        return cls(**counts, position=position)


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

    def to_json(self, session: Session) -> dict[str, Any]:
        """So that the first log after a resume covers the steps before it, too."""
        first_step = self.first_step + self.empty_steps
        return {"first_step": first_step, "losses": losses_to_json(self.loss_sum, session)}

    def restore(self, value: Any, session: Session, where: str = "the checkpoint") -> None:
        """Take over what `to_json` returned, at any world size. Raises `CheckpointDamaged`, naming
        `where`, for anything else."""
        match value:
            case {"first_step": int(first_step), "losses": [_, *_] as stored} if (
                type(first_step) is int
                and 0 <= first_step <= self.first_step
                and all(loss is None or type(loss) is float for loss in stored)
            ):
                own = losses_from_json(stored, session.world)
            case _:
                raise CheckpointDamaged(f"{where}: its window is malformed: {value!r:.200}")
        self.first_step, self.empty_steps, self.loss_sum = first_step, 0, own


def losses_to_json(loss: Any, session: Session) -> list[float | None]:
    """Every feeder's sum of losses, in order; None where it is no finite number."""
    own = float(loss)
    gathered = session.exchange([session.world.feeder_index, own if math.isfinite(own) else None])
    return list(dict(sorted(gathered, key=lambda pair: pair[0])).values())


def losses_from_json(stored: Sequence[float | None], world: World) -> float:
    """Return this feeder's sum, or the mean of all if the number of feeders was another one."""
    losses = [math.nan if loss is None else float(loss) for loss in stored]
    same = len(losses) == world.num_feeders
    return losses[world.feeder_index] if same else math.fsum(losses) / len(losses)

"""Detects loss spikes some steps after they occur, so that no step waits for the device, and
reports or undoes them.

Each step's loss stays on the device until the next log or save, which waits for the device anyhow.
There the losses are reduced over ranks together, so every rank finds the same spikes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import closing
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernel.batches import Group, Groups, Position
from ..kernel.contract import Session
from ..kernel.errors import CheckpointDamaged, TrainingDiverged
from ..kernel.events import LossSpiked
from ..kernel.paths import Place
from .settings import SpikeSettings

__all__ = ["SkipGroups", "Spikes"]

_JUDGED_FROM = 20
"""Number of steps before spikes are judged: fewer steps do not show the usual loss."""
_ALL = "all"
"""The name of the only turn if updates do not take turns."""


class _Step(NamedTuple):
    number: int
    position: Position
    num_samples: int


class Spikes:
    """Watches for spikes on one rank. All ranks call every method in the same order.

    `where(position, num_samples)` describes the samples of a group. `turn_of(number)` returns the
    name of an update's turn: losses are compared with losses of the same turn only; by default all
    are compared.
    """

    def __init__(
        self,
        settings: SpikeSettings,
        session: Session,
        where: Callable[[Position, int], str],
        turn_of: Callable[[int], str] | None = None,
    ) -> None:
        self.settings, self.session, self.where = settings, session, where
        self.turn_of = turn_of or (lambda _: _ALL)
        self.left_out: set[tuple[int, int]] = set()
        """Epoch and first sample of each group that must not be trained on again."""
        self.roll_backs = 0
        self.watches = settings.factor is not None
        self._history: dict[str, list[float]] = {}
        self._steps: list[_Step] = []
        self._losses: list[Tensor] = []
        self._before: _Step | None = None

    def add(self, number: int, group: Group, loss: Tensor) -> None:
        """Add one more step, without waiting for the device."""
        self._steps.append(_Step(number, group.position, group.num_samples))
        self._losses.append(loss)

    def find(self) -> list[LossSpiked]:
        """Return the spikes among the steps added since the last call. Waits for the device."""
        if not self._steps:
            return []
        sums = self.session.reduce(torch.stack(self._losses).float())
        losses = (sums / self.session.world.num_feeders).tolist()
        steps, self._steps, self._losses = self._steps, [], []
        return [
            spike
            for step, loss in zip(steps, losses, strict=True)
            if (spike := self._judge(step, loss))
        ]

    def _judge(self, step: _Step, loss: float) -> LossSpiked | None:
        before, self._before = self._before, step
        if not math.isfinite(loss):
            return None  # that step was not applied
        history = self._history.setdefault(self.turn_of(step.number), [])
        usual, limit = self._limit(history)
        if loss <= limit:
            history.append(loss)
            del history[: -self.settings.history]
            return None
        for each in filter(None, (before, step)):
            self.left_out.add((each.position.epoch, each.position.samples))
        samples = self.where(step.position, step.num_samples)
        return LossSpiked(step.number, loss, usual, samples)

    def _limit(self, history: list[float]) -> tuple[float, float]:
        """Return the usual loss, and the limit above which a loss is a spike."""
        assert self.settings.factor is not None
        if len(history) < _JUDGED_FROM:
            return math.nan, math.inf
        losses = torch.tensor(history, dtype=torch.float64)
        usual = float(losses.median())
        deviation = 1.4826 * float((losses - usual).abs().median())
        # if losses hardly differ, rounding errors would count as spikes
        return usual, usual + self.settings.factor * max(deviation, 1e-3 * abs(usual))

    # --- saving and resuming --------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the state for `restore`."""
        return {
            "history": self._history,
            "left_out": sorted(self.left_out),
            "roll_backs": self.roll_backs,
        }

    def restore(self, value: Any, where: str = "the checkpoint") -> None:
        """Restore the result of `to_json`; groups that are left out stay left out. Raises
        `CheckpointDamaged`, naming `where`.
        """
        self._history, self._steps, self._losses, self._before = {}, [], [], None
        if not value:
            return
        try:
            history = value["history"]
            if isinstance(history, list):  # from before turns were distinguished
                history = {_ALL: history}
            self._history = {name: [float(x) for x in kept] for name, kept in history.items()}
            self.left_out |= {(int(epoch), int(first)) for epoch, first in value["left_out"]}
            self.roll_backs = max(self.roll_backs, int(value["roll_backs"]))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointDamaged(f"{where}: its spikes are malformed: {error!r}") from error

    def diverged(self, checkpoint: Place) -> TrainingDiverged:
        """Return the error of a run that has no roll-backs left."""
        return TrainingDiverged(
            f"the loss spiked again after {self.roll_backs} roll-backs (spikes.max_roll_backs); "
            f"the last checkpoint is {checkpoint}, from before the spike. Lower optimizer.lr, "
            "lengthen schedule.warmup, or check the samples that were named"
        )


class SkipGroups:
    """`Groups` without the groups that spikes have left out."""

    def __init__(self, groups: Groups, left_out: set[tuple[int, int]]) -> None:
        self.whole, self.left_out = groups, left_out

    def groups(self, start: Position, num_steps: int) -> Generator[Group, None, None]:
        """See `Groups`."""
        whole: Any = self.whole.groups(start, num_steps + len(self.left_out))
        with closing(whole):
            yield from islice(filter(self._wanted, whole), num_steps)

    def _wanted(self, group: Group) -> bool:
        wanted = (group.position.epoch, group.position.samples) not in self.left_out
        if not wanted:
            for _ in group.microbatches:
                pass  # each is fetched when requested, and the next group waits for it
        return wanted

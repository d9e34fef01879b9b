"""Finds losses far above the usual, later than they come, so that nothing waits for the device;
announces or undoes them.

Each step's loss stays on the device until the next log or save, which waits for it anyhow; there
they are reduced over ranks together, so every rank finds the same spikes.
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
"""Steps before spikes are judged: fewer do not show the usual loss."""
_ALL = "all"
"""The name of every turn where updates are alike."""


class _Step(NamedTuple):
    number: int
    position: Position
    num_samples: int


class Spikes:
    """Watches for spikes on one rank. Every method is called by all ranks in the same order.

    `where(position, num_samples)`: describes the samples of a group. `turn_of(number)`: the name of
    the turn of that update, whose losses are compared with each other; by default all are.
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
        """Epoch and first sample of each group that is not to be trained on again."""
        self.roll_backs = 0
        self.watches = settings.factor is not None
        self._history: dict[str, list[float]] = {}
        self._steps: list[_Step] = []
        self._losses: list[Tensor] = []
        self._before: _Step | None = None

    def add(self, number: int, group: Group, loss: Tensor) -> None:
        """One more step; waits for nothing."""
        self._steps.append(_Step(number, group.position, group.num_samples))
        self._losses.append(loss)

    def find(self) -> list[LossSpiked]:
        """The spikes among the steps added since the last call. Waits for the device."""
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
        """The usual loss, and the one from which on it is a spike."""
        assert self.settings.factor is not None
        if len(history) < _JUDGED_FROM:
            return math.nan, math.inf
        losses = torch.tensor(history, dtype=torch.float64)
        usual = float(losses.median())
        deviation = 1.4826 * float((losses - usual).abs().median())
        # losses that hardly differ would make a spike of each rounding
        return usual, usual + self.settings.factor * max(deviation, 1e-3 * abs(usual))

    # --- saving and resuming --------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The state, as `restore` takes it."""
        return {
            "history": self._history,
            "left_out": sorted(self.left_out),
            "roll_backs": self.roll_backs,
        }

    def restore(self, value: Any, where: str = "the checkpoint") -> None:
        """Take over what `to_json` returned; what is left out stays so. Raises
        `CheckpointDamaged`, naming `where`.
        """
        self._history, self._steps, self._losses, self._before = {}, [], [], None
        if not value:
            return
        try:
            history = value["history"]
            if isinstance(history, list):  # before turns were told apart
                history = {_ALL: history}
            self._history = {name: [float(x) for x in kept] for name, kept in history.items()}
            self.left_out |= {(int(epoch), int(first)) for epoch, first in value["left_out"]}
            self.roll_backs = max(self.roll_backs, int(value["roll_backs"]))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointDamaged(f"{where}: its spikes are malformed: {error!r}") from error

    def diverged(self, checkpoint: Place) -> TrainingDiverged:
        """The error of a run that may not roll back once more."""
        return TrainingDiverged(
            f"the loss spiked again after {self.roll_backs} roll-backs (spikes.max_roll_backs); "
            f"the last checkpoint is {checkpoint}, from before the spike. Lower optimizer.lr, "
            "lengthen schedule.warmup, or check the samples that were named"
        )


class SkipGroups:
    """`Groups` without some of them."""

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
                pass  # each is fetched when it is asked for, and the next group waits for it
        return wanted

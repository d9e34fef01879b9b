"""Keeps the account of a run's time, and says what is remarkable about it."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..data.fetch_times import FetchTimes
from ..data.indexed import Loader
from ..data.prebatched import PrebatchedLoader
from ..kernel.batches import Group, Groups, Position
from ..kernel.contract import Session
from ..kernel.events import Event
from ..kernel.progress import Progress
from .settings import Settings
from .step_clock import PARTS, UPDATE, StepClock
from .synchronisations import SynchronisationFinder
from .time_verdicts import Spent, Verdict, verdicts

__all__ = ["TimeAccounting", "TimeSpent", "num_cores"]

_JUDGED_FROM = 4
"""Number of the log from which the run's time is judged; again at each power of two."""


@dataclass(frozen=True)
class TimeSpent(Event):
    """The account of a run's time after its first step; an event.

    It is announced at the 4th, 8th, 16th ... log and at the end. All ranks take part in it.
    """

    step: int
    steps: int
    seconds: Mapping[str, float]
    """Seconds of this rank in these steps, by part (see `step_clock`)."""
    verdicts: Sequence[Mapping[str, Any]]
    """Remarkable parts, the largest share first: `kind`, `share` and `text` of each."""
    news: Sequence[str]
    """The texts of kinds that no event before this one had."""
    rest: Mapping[str, float]
    """At the end: the seconds since the last log, by part."""


class TimeAccounting:
    """Called by all ranks in the same order."""

    def __init__(
        self, clock: StepClock, session: Session, source: object, settings: Settings
    ) -> None:
        self.clock, self.session, self.source, self.settings = clock, session, source, settings
        self.evaluations = self.saves = 0
        self.finder = SynchronisationFinder() if settings.find_synchronisations else None
        self._first: _Start | None = None
        self._logs = 0
        self._reported: set[str] = set()
        self._judged: tuple[Spent, list[Verdict]] | None = None

    def watched(self, groups: Groups) -> Groups:
        """Return the same groups; the time after the last of them is no wait for data."""
        return _UntilTheEnd(groups, self.clock)

    def begin(self, progress: Progress) -> None:
        """Call it after the first step of the run, which is left out: it starts workers, and
        compiles."""
        self._first = self._now(progress)
        self.clock.forget_waits()
        if self.finder is not None:
            self.finder.forget()

    @property
    def has_begun(self) -> bool:
        """True after the call of `begin`."""
        return self._first is not None

    def logged(self, progress: Progress) -> TimeSpent | None:
        """Judge the time at some logs."""
        self._logs += 1
        if self._logs < _JUDGED_FROM or self._logs & (self._logs - 1):
            return None
        self.judge(progress)
        return self._event(progress.step, {})

    def judge(self, progress: Progress) -> None:
        """Compare the ranks, and judge the time so far."""
        spent = self._spent(progress)
        self._judged = spent, verdicts(spent)

    def ended(self, step: int) -> TimeSpent:
        """The account of a run that is over, with what was judged last."""
        return self._event(step, self.clock.take())

    def _event(self, step: int, rest: Mapping[str, float]) -> TimeSpent:
        spent, found = self._judged or (Spent(0, {}), [])
        news = tuple(each.text for each in found if each.kind not in self._reported)
        self._reported |= {each.kind for each in found}
        all_found = tuple(vars(each) for each in found)
        return TimeSpent(step, spent.steps, spent.seconds, all_found, news, rest)

    def _spent(self, progress: Progress) -> Spent:
        now, first = self._now(progress), self._first
        if first is None:
            first = now
        seconds = {part: now.seconds[part] - first.seconds[part] for part in PARTS}
        world = self.session.world
        ranks = [dict(zip(PARTS, row, strict=True)) for row in self._of_ranks(seconds)]
        return Spent(
            steps=now.step - first.step,
            seconds=seconds,
            ranks=ranks,
            data=self.kind(),
            workers=self.settings.data.workers,
            cores=num_cores(),
            samples=(now.samples - first.samples) // world.num_readers,
            batches=now.batches - first.batches,
            fetch_seconds=now.fetch_seconds - first.fetch_seconds,
            collate_seconds=now.collate_seconds - first.collate_seconds,
            evaluations=self.evaluations - first.evaluations,
            saves=self.saves - first.saves,
            saves_in_background=self.settings.checkpoint.background,
            observers={
                name: spent - first.observers.get(name, 0.0)
                for name, spent in now.observers.items()
            },
            synchronisations=self.finder.found() if self.finder is not None else (),
            longest_waits=self.clock.longest_waits,
        )

    def _of_ranks(self, seconds: Mapping[str, float]) -> list[list[float]]:
        own = [seconds[part] for part in PARTS]
        return [own] if self.session.world.size == 1 else self.session.exchange(own)

    def kind(self) -> Literal["indexed", "stream", "batches"]:
        """Return the kind of the training data, on which the remedy depends."""
        if isinstance(self.source, PrebatchedLoader):
            return "batches"
        return "indexed" if isinstance(self.source, Loader) else "stream"

    def _now(self, progress: Progress) -> _Start:
        times = getattr(self.source, "times", None)
        times = times if isinstance(times, FetchTimes) else FetchTimes()
        return _Start(
            step=progress.step,
            samples=progress.samples,
            seconds=self.clock.totals(),
            observers=self.clock.of_observers(),
            batches=times.batches,
            fetch_seconds=times.fetch_seconds,
            collate_seconds=times.collate_seconds,
            evaluations=self.evaluations,
            saves=self.saves,
        )


class _UntilTheEnd:
    """`Groups`, after the last of which workers are closed."""

    def __init__(self, groups: Groups, clock: StepClock) -> None:
        self._groups, self._clock = groups, clock

    def groups(self, start: Position, num_steps: int) -> Generator[Group, None, None]:
        """See `Groups`."""
        yield from self._groups.groups(start, num_steps)
        self._clock.instead(UPDATE)


@dataclass(frozen=True)
class _Start:
    """The counts at a step."""

    step: int
    samples: int
    seconds: Mapping[str, float]
    observers: Mapping[str, float]
    batches: int
    fetch_seconds: float
    collate_seconds: float
    evaluations: int
    saves: int


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) if _HAS_AFFINITY else os.cpu_count() or 1)


_HAS_AFFINITY = hasattr(os, "sched_getaffinity")

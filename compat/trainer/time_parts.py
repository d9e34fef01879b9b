"""Measures the parts of the time of a training, if an argument requests it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from ...kernel.events import Event
from ...kernel.progress import Progress
from ...trainer.step_clock import EVALUATION, SAVING, StepClock
from ...trainer.time_accounting import TimeAccounting, TimeSpent
from ..arguments.backend import settings
from ..arguments.reports import TIMES
from .hf_terms import in_hf_terms

__all__ = ["TimeParts"]

_LOG = logging.getLogger(__name__)


class TimeParts(TimeAccounting):
    """The account of one call of `train`. Called by all ranks in the same order."""

    @classmethod
    def of(cls, trainer: Any, record: Callable[[Event], object] | None) -> TimeParts | None:
        """Return the account of a call of `train`; None if nothing requests one."""
        asked = any(getattr(trainer.args, name, False) for name in TIMES)
        return cls(trainer, record) if asked or record is not None else None

    def __init__(self, trainer: Any, record: Callable[[Event], object] | None) -> None:
        """`record`: records the account, besides the logs."""
        session, clock = trainer.driver_session.session, StepClock()
        clock.watch(session)
        own = settings(trainer.args, trainer.model)
        workers = replace(own.data, workers=trainer.args.dataloader_num_workers)
        finds = getattr(trainer.args, "find_synchronisations", False)
        own = replace(own, data=workers, find_synchronisations=finds)
        super().__init__(clock, session, None, own)
        self._record, self._shown = record, bool(getattr(trainer.args, "time_parts", False))
        self._warns = self._shown or finds
        self.last_seconds: dict[str, float] = {}
        """Seconds of the last block of each part."""

    def kind(self) -> Literal["indexed"]:
        """Return the kind whose remedy is more workers, as for any data of a `DataLoader`."""
        return "indexed"

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Let the time of the block, an evaluation or a save, say, belong to a part."""
        self.evaluations += part == EVALUATION
        self.saves += part == SAVING
        since = time.perf_counter()
        with self.clock.within(part):
            yield
        self.last_seconds[part] = time.perf_counter() - since

    def logs(self, progress: Progress, parts: Mapping[str, float]) -> dict[str, float]:
        """Return `time_data` and so on, the seconds of `parts` since the last log, if they are to
        be shown. Report what is remarkable."""
        if spent := self.logged(progress):
            self._report(spent)
        return {f"time_{part}": seconds for part, seconds in parts.items()} if self._shown else {}

    def finish(self, progress: Progress) -> None:
        """Judge the time of the whole training."""
        self.judge(progress)
        self._report(self.ended(progress.step))

    def _report(self, spent: TimeSpent) -> None:
        verdicts = [{**each, "text": in_hf_terms(each["text"])} for each in spent.verdicts]
        spent = replace(spent, verdicts=verdicts, news=[*map(in_hf_terms, spent.news)])
        if self._record is not None:
            self._record(spent)
        if self._warns and self.session.world.rank == 0:
            for text in spent.news:
                _LOG.warning("time: %s", text)

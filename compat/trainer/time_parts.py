"""Measures the parts of the time of a training, if `time_parts` requests it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Literal

from ...kernel.progress import Progress
from ...trainer.step_clock import StepClock
from ...trainer.time_accounting import TimeAccounting, TimeSpent
from ..arguments.backend import settings
from .hf_terms import in_hf_terms

__all__ = ["TimeParts"]

_LOG = logging.getLogger(__name__)


class TimeParts(TimeAccounting):
    """The account of one call of `train`. Called by all ranks in the same order."""

    def __init__(self, trainer: Any) -> None:
        session, clock = trainer.driver_session.session, StepClock()
        clock.watch(session)
        own = settings(trainer.args, trainer.model)
        workers = replace(own.data, workers=trainer.args.dataloader_num_workers)
        super().__init__(clock, session, None, replace(own, data=workers))

    def kind(self) -> Literal["indexed"]:
        """Return the kind whose remedy is more workers, as for any data of a `DataLoader`."""
        return "indexed"

    def logs(self, progress: Progress) -> dict[str, float]:
        """Return `time_data` and so on, seconds since the last log. Log what is remarkable."""
        parts = {f"time_{part}": seconds for part, seconds in self.clock.take().items()}
        if spent := self.logged(progress):
            self._warn(spent)
        return parts

    def finish(self, progress: Progress) -> None:
        """Judge the time of the whole training."""
        self.judge(progress)
        self._warn(self.ended(progress.step))

    def _warn(self, spent: TimeSpent) -> None:
        if self.session.world.rank == 0:
            for text in spent.news:
                _LOG.warning("time: %s", in_hf_terms(text))

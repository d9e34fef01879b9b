"""Ends a run whose evaluations no longer improve."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Literal

from ..kernel import events
from .watched_metric import WatchesMetric

__all__ = ["EarlyStopping"]


class EarlyStopping(WatchesMetric):
    """An observer that ends the run when a metric has not improved for a while: `fit(...,
    observers=[EarlyStopping("held_out.loss", patience=5)])`, or the settings `stop.*`.

    `metric`: a name such as `held_out.loss`, where `held_out` is a data set of `eval_data`; the
    first data set's metrics have their bare names, too. `patience`: the run ends after this many
    consecutive evaluations that were not better than the best before them by more than
    `min_change`. A value that is not finite is never better. Its state is saved with each
    checkpoint, so a resumed run continues the count. A run that it ended ends at once when it is
    resumed, unless `patience` is larger now. `report` is called with the reason on every rank; by
    default rank 0 prints it on stderr.

    Raises `SettingError` for a metric that the data set does not have.
    """

    decides = "stop"

    def __init__(
        self,
        metric: str,
        patience: int = 3,
        mode: Literal["min", "max"] = "min",
        min_change: float = 0.0,
        *,
        report: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(metric, patience, mode, min_change)
        self.report = report
        self._rank = 0

    def __call__(self, event: events.Event) -> events.Request | None:
        if isinstance(event, events.RunStarted):
            self._rank = event.world.rank
        elif not self.add(event):
            return None
        if not self.is_exhausted:
            return None
        self._report_stop()
        return events.Request.STOP

    def _report_stop(self) -> None:
        best = f"the best was {self._best:.6g}, at step {self._best_step}"
        if math.isnan(self._best):
            best = "none was finite"
        times = "evaluation" if self._misses == 1 else f"{self._misses} evaluations"
        words = f"stopped early: {self.metric} did not improve in the last {times}; {best}"
        if self.report is not None:
            self.report(words)
        elif self._rank == 0:
            print(words, file=sys.stderr, flush=True)

"""Ends a run whose evaluations no longer improve."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ..kernel import events
from ..kernel.errors import SettingError
from .metric_names import metrics_by_name

__all__ = ["EarlyStopping"]


class EarlyStopping:
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

    def __init__(
        self,
        metric: str,
        patience: int = 3,
        mode: Literal["min", "max"] = "min",
        min_change: float = 0.0,
        *,
        report: Callable[[str], None] | None = None,
    ) -> None:
        if patience < 1:
            raise SettingError(f"patience is {patience}; it must be at least 1")
        if mode not in ("min", "max"):
            raise SettingError(f"mode is {mode!r}; it must be 'min' or 'max'")
        if not min_change >= 0:
            raise SettingError(f"min_change is {min_change}; it must be at least 0")
        self.metric, self.patience, self.mode, self.min_change = metric, patience, mode, min_change
        self.report = report
        self._first: str | None = None
        """The first data set that is evaluated."""
        self._rank, self._best, self._best_step, self._misses = 0, math.nan, 0, 0

    def __call__(self, event: events.Event) -> events.Request | None:
        if isinstance(event, events.RunStarted):
            self._rank = event.world.rank
        elif isinstance(event, events.Evaluated):
            value = self._value(event)
            if value is None:
                return None
            self._add(value, event.step)
        else:
            return None
        if self._misses < self.patience:
            return None
        self._report_stop()
        return events.Request.STOP

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far (None if there is none), its step, and the evaluations
        since."""
        return {
            "metric": self.metric,
            "mode": self.mode,
            "best": None if math.isnan(self._best) else self._best,
            "best_step": self._best_step,
            "misses": self._misses,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict` for the same metric. Raises ValueError for another
        structure."""
        best, step, misses = (state.get(name) for name in ("best", "best_step", "misses"))
        whole = all(isinstance(number, int) and number >= 0 for number in (step, misses))
        if not whole or not isinstance(best, (int, float, type(None))):
            raise ValueError(f"best is {best!r:.40}, best_step {step!r:.40}, misses {misses!r:.40}")
        if (state.get("metric"), state.get("mode")) == (self.metric, self.mode):
            self._best = math.nan if best is None else float(best)
            self._best_step, self._misses = int(step or 0), int(misses or 0)

    def _value(self, event: events.Evaluated) -> float | None:
        """Return the metric if it belongs to this data set."""
        self._first = self._first or event.name
        name, metric = event.name, self.metric
        value = metrics_by_name({self._first: {}, name: event.metrics}).get(metric)
        is_bare = name == self._first and "." not in metric
        if value is None and (is_bare or metric.startswith(f"{name}.")):
            known = ", ".join(sorted(event.metrics))
            raise SettingError(
                f"the run is to stop by {self.metric!r}, and {name} has no such metric; it has "
                f"{known}"
            )
        return None if value is None else float(value)

    def _add(self, value: float, step: int) -> None:
        gain = self._best - value if self.mode == "min" else value - self._best
        if math.isfinite(value) and (math.isnan(self._best) or gain > self.min_change):
            self._best, self._best_step, self._misses = value, step, 0
        else:
            self._misses += 1

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

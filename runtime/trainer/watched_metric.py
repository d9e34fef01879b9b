"""An observer of one metric of the evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..kernel import events
from ..kernel.errors import SettingError
from .metric_names import metrics_by_name

__all__ = ["WatchesMetric"]


class WatchesMetric:
    """Keeps the best value of a metric so far, and counts the evaluations since then. Its state is
    saved with each checkpoint.

    `metric`: a name such as `held_out.loss`, where `held_out` is a data set of `eval_data`; the
    first data set's metrics have their bare names, too. A value is better than the best by more
    than `min_change`; one that is not finite is never better.
    """

    decides = ""
    """End of "the run is to ... by" the metric, in messages."""

    def __init__(self, metric: str, patience: int, mode: str, min_change: float) -> None:
        """Raises `SettingError`."""
        if patience < 1:
            raise SettingError(f"patience is {patience}; it must be at least 1")
        if mode not in ("min", "max"):
            raise SettingError(f"mode is {mode!r}; it must be 'min' or 'max'")
        if not min_change >= 0:
            raise SettingError(f"min_change is {min_change}; it must be at least 0")
        self.metric, self.patience, self.mode, self.min_change = metric, patience, mode, min_change
        self._first: str | None = None
        """The first data set that is evaluated."""
        self._best, self._best_step, self._misses = math.nan, 0, 0

    def add(self, event: events.Event) -> bool:
        """Take a value from an event; return False if the event does not have the metric. Raises
        `SettingError` for a metric that the data set does not have."""
        if not isinstance(event, events.Evaluated) or (value := self._value(event)) is None:
            return False
        gain = self._best - value if self.mode == "min" else value - self._best
        if math.isfinite(value) and (math.isnan(self._best) or gain > self.min_change):
            self._best, self._best_step, self._misses = value, event.step, 0
        else:
            self._misses += 1
        return True

    @property
    def is_exhausted(self) -> bool:
        """True after `patience` consecutive evaluations without a better value."""
        return self._misses >= self.patience

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
                f"the run is to {self.decides} by {metric!r}, and {name} has no such metric; it "
                f"has {known}"
            )
        return None if value is None else float(value)

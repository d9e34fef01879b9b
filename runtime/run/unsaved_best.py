"""The best evaluation of a run, if it is better than the best checkpoint."""

from __future__ import annotations

from typing import Any

from ..checkpoint import Best
from .charts import evaluated
from .run_history import RunHistory
from .shown_config import ShownConfig

__all__ = ["unsaved_best"]


def unsaved_best(
    history: RunHistory, config: ShownConfig, best: Best | None
) -> dict[str, Any] | None:
    """Return step, metric and value of the best evaluation by `checkpoint.best_metric`. Return None
    unless it is better than the best checkpoint."""
    metric, mode = config.best
    if best is None or best.metric != metric:
        return None
    sign = -1 if mode == "max" else 1
    for _, _, series in evaluated(history, config):
        if series.best is not None:
            step, value = series.best
            if value is not None and sign * value < sign * best.value:
                return {"step": step, "metric": metric, "value": value}
    return None

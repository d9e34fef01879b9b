"""Metrics of a run's speed, and formatting of metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ..theirs import theirs

__all__ = ["metrics_format", "speed_metrics"]


def metrics_format(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Format metrics for people: MB, GF, h:mm:ss.cc, and four decimals."""
    shown: dict[str, Any] = theirs("trainer_pt_utils", "metrics_format")(dict(metrics))
    return shown


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: float | None = None,
    num_steps: float | None = None,
    num_tokens: float | None = None,
) -> dict[str, float]:
    """Return the seconds since `start_time` (of `time.time()`), and rates per second.

    Keys `<split>_runtime` (4 decimals), `<split>_samples_per_second` and so on (3 decimals) for
    each number given; no rates when no time has passed.
    """
    seconds = time.time() - start_time
    metrics = {f"{split}_runtime": round(seconds, 4)}
    counts = {"samples": num_samples, "steps": num_steps, "tokens": num_tokens}
    for what, count in counts.items():
        if count is not None and seconds > 0:
            metrics[f"{split}_{what}_per_second"] = round(count / seconds, 3)
    return metrics

"""The charts of a page: selects the curves, and groups them in charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ..trainer.metric_names import metrics_by_name
from .curve import Point, fewer
from .run_history import RunHistory
from .shown_config import ShownConfig

__all__ = ["MAX_EVALUATED", "Chart", "Series", "best_point", "charts", "evaluated", "within_bounds"]

MAX_EVALUATED = 24
"""Maximum number of evaluation metrics drawn for one run."""
_MAX_LINES = 100
"""Maximum number of lines in one chart."""
_MAX_POINTS = 16_000
"""Maximum number of points on a page, which bounds its size."""
_MOST, _FEWEST = 500, 20
"""Maximum and minimum number of points of a line."""


@dataclass(frozen=True)
class Series:
    """Values by step; a value that is None leaves a gap."""

    name: str
    points: Sequence[Point]
    colour: int | None = None
    """Number of the colour; None: by the place in the chart."""
    best: Point | None = None
    """The point to mark."""
    clock: int = 0
    """Number of the run whose clock the series uses."""


@dataclass(frozen=True)
class Chart:
    """Lines that are drawn on the same axes."""

    title: str
    lines: Sequence[Series]
    stacked: bool = False
    """Each line is the upper edge of an area that begins at the line before it."""


def charts(history: RunHistory, config: ShownConfig) -> list[Chart]:
    """Return the charts of one run for which records exist."""
    unit = history.logged["item_name"] if history.logged else "items"
    loss = [Series("training", history.figures("loss"))]
    loss += [Series(f"training: {name}", points) for name, points in history.turns()]
    metrics: dict[str, list[Series]] = {}
    for _, name, line in islice(evaluated(history, config), MAX_EVALUATED):
        if name == "loss":
            loss.append(line)
        else:
            metrics.setdefault(name, []).append(line)
    found = [Chart("Loss", loss)]
    for name, lines in metrics.items():
        title = name if len(lines) > 1 else f"{lines[0].name}: {name}"
        found.append(Chart(title, lines))
    found += [
        Chart(title, [Series(title, history.figures(name))])
        for title, name in (
            ("Learning rate", "learning_rate"),
            ("Gradient norm (before clipping)", "grad_norm"),
            (f"Throughput ({unit} a second)", "items_per_second"),
        )
    ]
    rank = " of rank 0" if config.world_size > 1 else ""
    parts = [Series(title, points) for title, points in history.time_shares()]
    found.append(Chart(f"Where the time goes{rank} (%)", parts, stacked=True))
    return within_bounds([*found, *_system(history, config)])


def _system(history: RunHistory, config: ShownConfig) -> list[Chart]:
    """Yield charts of the memory and the processor load of the first rank."""
    rank = " of rank 0" if config.world_size > 1 else ""
    return [
        Chart(
            f"{title}{rank} ({unit})",
            [Series(label, history.figures(name)) for label, name in lines.items()],
        )
        for title, unit, lines in (
            (
                "Memory of the process",
                "bytes",
                {"in use": "process_bytes", "peak": "process_peak_bytes"},
            ),
            ("Processor load", "cores", {"cores": "processor_cores"}),
            (
                "Memory of the device",
                "bytes",
                {"in use": "device_bytes", "peak": "device_peak_bytes"},
            ),
        )
    ]


def evaluated(history: RunHistory, config: ShownConfig) -> Iterator[tuple[str, str, Series]]:
    """Yield each data set, metric and its curve. The best point of `checkpoint.best_metric` is
    marked."""
    metric, mode = config.best
    curves = [*history.evaluated()]
    by_data: dict[str, dict[str, Sequence[Point]]] = {}
    for data, name, points in curves:
        by_data.setdefault(data, {})[name] = points
    chosen = metrics_by_name(by_data).get(metric)
    for data, name, points in curves:
        best = best_point(points, mode) if points is chosen else None
        yield data, name, Series(data, points, best=best)


def best_point(points: Sequence[Point], mode: str) -> Point | None:
    """Return the point of the least or the largest value; the earlier wins a tie. None if no value
    is finite."""
    sign = -1 if mode == "max" else 1
    finite = [(sign * value, step) for step, value in points if value is not None]
    if not finite:
        return None
    value, step = min(finite)
    return step, sign * value


def within_bounds(found: Sequence[Chart]) -> list[Chart]:
    """Return the charts that have points, thinned to the limit of a page."""
    drawn = [
        replace(chart, lines=[line for line in chart.lines if line.points][:_MAX_LINES])
        for chart in found
    ]
    drawn = [chart for chart in drawn if chart.lines]
    most = _MAX_POINTS // max(1, sum(len(chart.lines) for chart in drawn))
    most = max(_FEWEST, min(_MOST, most))
    return [
        replace(
            chart,
            lines=[replace(line, points=fewer(line.points, most)) for line in chart.lines],
        )
        for chart in drawn
    ]

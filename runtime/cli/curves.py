"""The curves of a run as inline SVG that takes its colours from the page around it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Any

from .records import Record

__all__ = ["Series", "curves", "draw"]

# matplotlib writes these colours, and the page's style takes their place
_INK = "#000001"
_LINES = {f"#00000{2 + index}": f"var(--line-{1 + index})" for index in range(6)}
_COLOURS = {_INK: "currentColor", **_LINES}
_STYLES = ("-", "--", ":", "-.")
_SPARSE = 20
"""Points, up to which each is marked."""


@dataclass(frozen=True)
class Series:
    """Values by step; a value that is None leaves a gap."""

    name: str
    steps: Sequence[int]
    values: Sequence[float | None]
    colour: int | None = None
    """By number; None: by its place in the chart."""


def curves(records: Sequence[Record]) -> dict[str, str]:
    """Title -> SVG of each curve that there are records for."""
    logged = [record for record in records if record["event"] == "logged"]
    evaluated = [record for record in records if record["event"] == "evaluated"]
    steps = [record["step"] for record in logged]
    unit = logged[-1]["item_name"] if logged else "items"

    def series(name: str, key: str) -> list[Series]:
        return [Series(name, steps, [record[key] for record in logged])] if logged else []

    loss = series("training", "loss")
    for turn in dict.fromkeys(name for record in logged for name in record.get("losses", ())):
        values = [record.get("losses", {}).get(turn) for record in logged]
        loss.append(Series(f"training: {turn}", steps, values))
    for name in dict.fromkeys(record["name"] for record in evaluated):
        points = [r for r in evaluated if r["name"] == name and "loss" in r["metrics"]]
        values = [record["metrics"]["loss"] for record in points]
        loss.append(Series(name, [record["step"] for record in points], values))
    charts = {
        "Loss": [line for line in loss if line.steps],
        "Learning rate": series("learning rate", "learning_rate"),
        "Gradient norm (before clipping)": series("gradient norm", "grad_norm"),
        f"Throughput ({unit} a second)": series("throughput", "items_per_second"),
    }
    return {title: draw(title, lines) for title, lines in charts.items() if lines}


def draw(title: str, lines: Sequence[Series]) -> str:
    """One chart, as an SVG element with a title for screen readers."""
    import matplotlib
    from matplotlib.figure import Figure

    look: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": title,  # ids that are stable, and differ between the charts of a page
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": _INK,
        "axes.edgecolor": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(look):
        figure = Figure(figsize=(5, 3), layout="constrained")
        axes = figure.add_subplot()
        plotted = []
        for index, line in enumerate(lines):
            number = index if line.colour is None else line.colour
            values = [float("nan") if value is None else value for value in line.values]
            plotted += axes.plot(
                line.steps,
                values,
                color=list(_LINES)[number % len(_LINES)],
                marker="o" if len(line.steps) <= _SPARSE else None,
                markersize=4,
                linewidth=1.5,
                linestyle=_STYLES[number // len(_LINES) % len(_STYLES)],
            )
        axes.grid(color=_INK, alpha=0.15, linewidth=0.5)
        axes.set_xlabel("step")
        axes.ticklabel_format(axis="y", scilimits=(-2, 4), useMathText=True)
        if 1 < len(lines) <= len(_LINES):
            # a name may hold what matplotlib takes for mathematics
            names = [line.name.replace("$", r"\$") for line in lines]
            figure.legend(plotted, names, frameon=False, loc="outside upper center", ncols=2)
        file = StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _inline(file.getvalue(), title)


def _inline(svg: str, title: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    for written, meant in _COLOURS.items():
        svg = svg.replace(written, meant)
    head, bracket, rest = svg.partition(">")
    return f'{head} role="img" aria-label="{escape(title)}"{bracket}{rest}'

"""Draws charts as inline SVG that takes its colours from the page around it.

Drawing takes some milliseconds, since pages are drawn during training and at each view
(`docs/decisions/0023`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from .charts import Chart, Series
from .format import figure as shown

__all__ = ["figure"]

_NUM_COLOURS = 6
_DASHES = ("", "6 3", "2 2", "7 2 2 2")
_SPARSE = 20
"""Up to this number of points, each point is marked."""
_WIDTH, _HEIGHT = 500, 300
_RIGHT, _TOP, _BOTTOM = 16, 10, 40
_DIGIT = 7.0
"""Width of a digit of a label."""
_MAX_ENTRIES = 24
"""Up to this number of lines, a chart has a legend."""
_FINEST = 1e-9
"""A range that is smaller than this, relative to its values, is drawn as if all values were
equal."""


def figure(chart: Chart, number: int) -> str:
    """Return the chart as HTML: title, legend, and the curves with a title for screen readers.
    `number`: the chart's index in the data of the page."""
    caption = f"{escape(chart.title)}{_legend(chart.lines)}"
    return f"<figure data-chart={number}><figcaption>{caption}</figcaption>{_svg(chart)}</figure>"


def _legend(lines: Sequence[Series]) -> str:
    entries = []
    for index, line in enumerate(lines):
        sample = f'<path d="M0 5h20" stroke-width="2" {_pen(index, line)}/>'
        name = escape(line.name) if len(lines) > 1 else ""
        if line.best is not None:
            step, value = line.best
            name += f"{name and ', '}best {shown(value)} at step {step}"
            sample += f'<circle cx="10" cy="5" r="4" fill="none" {_pen(index, line)}/>'
        if name:
            svg = f'<svg class="sample" viewBox="0 0 20 10" aria-hidden="true">{sample}</svg>'
            entries.append(f"<span>{svg} {name}</span>")
    if not 0 < len(entries) <= _MAX_ENTRIES:
        return ""
    return f'<span class="legend">{"".join(entries)}</span>'


def _svg(chart: Chart) -> str:
    lines = chart.lines
    steps = [step for line in lines for step, _ in line.points]
    values = [value for line in lines for _, value in line.points if value is not None]
    if chart.stacked:
        values.append(0.0)
    up = _Scale(values, _HEIGHT - _BOTTOM, _TOP)
    left = 14 + _DIGIT * max(len(label) for _, label in up.ticks)
    across = _Scale(steps, left, _WIDTH - _RIGHT, whole=True)
    text = 'font-family="sans-serif" font-size="12" fill="currentColor"'
    about = f'role="img" aria-label="{escape(chart.title)}"'
    parts = [f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" {about} {text}>']
    parts += _axes(across, up, left)
    drawn = list(enumerate(lines))
    for index, line in reversed(drawn) if chart.stacked else drawn:
        if chart.stacked:
            parts += _area(line, index, across, up)
        parts += _line(line, index, across, up)
    return "".join([*parts, "</svg>"])


class _Scale:
    """Maps values to places on the page, and selects round values for labels."""

    def __init__(
        self, values: Sequence[float], first: float, last: float, whole: bool = False
    ) -> None:
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        margin = (high - low) / 20
        if margin <= max(abs(low), abs(high)) * _FINEST:
            margin = max(1.0 if whole else 0.1, max(abs(low), abs(high)) / 10)
        self._low, self._size = low - margin, high - low + 2 * margin
        self._first, self._length = first, last - first
        places = list(_round_values(self._low, self._low + self._size, whole))
        labels = _labels(places)
        self.ticks = list(zip(places, labels, strict=True)) or [(low, _label(low, 4))]

    def __call__(self, value: float) -> float:
        return self._first + (value - self._low) / self._size * self._length


def _round_values(low: float, high: float, whole: bool) -> Iterator[float]:
    """Return about five values of 1, 2 or 5 times a power of ten."""
    wanted = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= wanted * 0.75)
    if whole:
        step = max(1.0, step)
    first = math.ceil(low / step)
    for number in range(first, first + 12):
        if number * step <= high:
            yield number * step


def _axes(across: _Scale, up: _Scale, left: float) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    grid = 'stroke="currentColor" stroke-width="0.5" opacity="0.15"'
    free = 0.0
    for tick, label in across.ticks:
        x, half = across(tick), _DIGIT * len(label) / 2
        yield f'<path d="M{x:.1f} {_TOP}V{bottom}" {grid}/>'
        middle = min(x, _WIDTH - half)
        if middle - half >= free:  # beside the label before it
            free = middle + half + _DIGIT
            yield f'<text x="{middle:.1f}" y="{bottom + 16}" text-anchor="middle">{label}</text>'
    for tick, label in up.ticks:
        y = up(tick)
        yield f'<path d="M{left} {y:.1f}H{right}" {grid}/>'
        yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    yield f'<path d="M{left} {_TOP}V{bottom}H{right}" fill="none" stroke="currentColor"/>'
    middle = (left + right) / 2
    yield f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">step</text>'


def _labels(values: Sequence[float]) -> list[str]:
    """Return labels with enough digits to distinguish the values."""
    labels: list[str] = []
    for digits in range(4, 11):
        labels = [_label(value, digits) for value in values]
        if len(set(labels)) == len(labels):
            break
    return labels


def _label(value: float, digits: int) -> str:
    """Format a short label: `0.25`, `20k`, `3e-4`."""
    if value == 0:
        return "0"
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if scale <= abs(value) < 1e12:
            return f"{value / scale:.{digits}g}{unit}"
    text = f"{value:.{digits}g}"
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else text


def _line(line: Series, index: int, across: _Scale, up: _Scale) -> Iterator[str]:
    path, pen_is_up, alone = [], True, []
    for step, value in line.points:
        if value is None:
            pen_is_up = True
            continue
        x, y = across(step), up(value)
        path.append(f"{'M' if pen_is_up else 'L'}{x:.1f} {y:.1f}")
        pen_is_up = False
        alone.append((x, y))
    colour, pen = _colour(index, line), _pen(index, line)
    if path:
        yield f'<path d="{"".join(path)}" fill="none" stroke-width="1.5" {pen}/>'
    if len(line.points) <= _SPARSE:
        for x, y in alone:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>'
    if line.best is not None and line.best[1] is not None:
        x, y = across(line.best[0]), up(line.best[1])
        pen = f'fill="none" stroke="{colour}" stroke-width="2"'
        yield f'<circle class="best" cx="{x:.1f}" cy="{y:.1f}" r="5" {pen}/>'


def _area(line: Series, index: int, across: _Scale, up: _Scale) -> Iterator[str]:
    """All below a line without gaps; areas of the lines before it are drawn over it."""
    places = [(across(step), up(value)) for step, value in line.points if value is not None]
    if places:
        edge = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        (first, _), (last, _), zero = places[0], places[-1], up(0.0)
        path = f"M{first:.1f} {zero:.1f}L{edge}L{last:.1f} {zero:.1f}Z"
        yield f'<path d="{path}" fill="{_colour(index, line)}"/>'


def _colour(index: int, line: Series) -> str:
    number = index if line.colour is None else line.colour
    return f"var(--line-{1 + number % _NUM_COLOURS})"


def _pen(index: int, line: Series) -> str:
    number = index if line.colour is None else line.colour
    dashes = _DASHES[number // _NUM_COLOURS % len(_DASHES)]
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'stroke="{_colour(index, line)}"{dashed}'

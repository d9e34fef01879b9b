"""Draws a map of values by layer and step as inline SVG, with the colours of the page around it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from .format import figure as shown
from .layer_maps import LayerMap

__all__ = ["heat_map"]

_WIDTH = 330
"""Width of a chart on a phone, where letters have this size."""
_TOP, _BOTTOM, _RIGHT = 4, 34, 8
_LETTER = 5.6
"""Width of a letter of a label."""
_MAX_LETTERS = 18
_HIGH, _LOW = 16.0, 11.0
"""Height of a row: of a few rows, and of many."""
_MAX_HEIGHT = 420
_NUM_SHADES = 8


def heat_map(drawn: LayerMap) -> str:
    """Return the map as HTML: title, legend, and the cells, darker for larger values. Shades are
    equal steps of the logarithm."""
    finite = [
        value for row in drawn.values for value in row if value is not None and 0 < value < math.inf
    ]
    low, high = (min(finite), max(finite)) if finite else (1.0, 1.0)
    legend = _legend(low, high, any(math.inf in row for row in drawn.values))
    caption = f"{escape(drawn.title)}{legend}"
    return f"<figure><figcaption>{caption}</figcaption>{_svg(drawn, low, high)}</figure>"


def _legend(low: float, high: float, has_nonfinite: bool) -> str:
    shades = "".join(
        f'<rect x="{10 * n}" width="10" height="10" {_fill(n)}/>' for n in range(_NUM_SHADES)
    )
    size = 10 * _NUM_SHADES
    strip = (
        f'<svg width="{size}" height="10" viewBox="0 0 {size} 10" aria-hidden="true">{shades}</svg>'
    )
    entries = f"<span>{shown(low)} {strip} {shown(high)}</span>"
    if has_nonfinite:
        sample = f'<rect width="20" height="10" {_fill(None)}/>'
        entries += (
            f'<span><svg class="sample" viewBox="0 0 20 10" aria-hidden="true">{sample}</svg> '
            "not finite</span>"
        )
    return f'<span class="legend">{entries}</span>'


def _svg(drawn: LayerMap, low: float, high: float) -> str:
    labels = _short_names(drawn.layers)
    left = 8 + _LETTER * max(map(len, labels))
    row_height = max(_LOW, min(_HIGH, _MAX_HEIGHT / len(labels)))
    column_width = (_WIDTH - _RIGHT - left) / len(drawn.steps)
    bottom = _TOP + row_height * len(labels)
    text = 'font-family="sans-serif" font-size="10" fill="currentColor"'
    about = f'role="img" aria-label="{escape(drawn.title)} by layer and step"'
    parts = [f'<svg class="chart" viewBox="0 0 {_WIDTH} {bottom + _BOTTOM:.0f}" {about} {text}>']
    for number, (name, label) in enumerate(zip(drawn.layers, labels, strict=True)):
        y = _TOP + row_height * (number + 0.5) + 3.5
        parts.append(
            f'<text x="{left - 4:.0f}" y="{y:.1f}" text-anchor="end">{escape(label)}'
            f"<title>{escape(name)}</title></text>"
        )
    paths: dict[int | None, list[str]] = {}
    for number, row in enumerate(drawn.values):
        y = _TOP + row_height * number
        for shade, start, length in _runs([_shade(value, low, high) for value in row]):
            x, width = left + column_width * start, column_width * length
            cells = f"M{x:.1f} {y:.1f}h{width:.1f}v{row_height:.1f}h-{width:.1f}z"
            paths.setdefault(shade, []).append(cells)
    parts += [f'<path d="{"".join(cells)}" {_fill(shade)}/>' for shade, cells in paths.items()]
    parts += _steps(drawn.steps, left, column_width, bottom)
    return "".join([*parts, "</svg>"])


def _steps(steps: Sequence[int], left: float, width: float, bottom: float) -> Iterator[str]:
    """Yield labels of the first, the last and some other steps."""
    number = min(len(steps), 4)
    for index in sorted({round(n * (len(steps) - 1) / max(1, number - 1)) for n in range(number)}):
        half = _LETTER * len(str(steps[index])) / 2
        x = min(left + width * (index + 0.5), _WIDTH - half)
        yield f'<text x="{x:.1f}" y="{bottom + 13:.0f}" text-anchor="middle">{steps[index]}</text>'
    middle = (left + _WIDTH - _RIGHT) / 2
    yield f'<text x="{middle:.0f}" y="{bottom + 28:.0f}" text-anchor="middle">step</text>'


_NO_CELL = -1


def _shade(value: float | None, low: float, high: float) -> int | None:
    """Return the number of a value's shade; None for a value that is not finite."""
    if value is None:
        return _NO_CELL
    if math.isinf(value):
        return None
    if value <= low or high <= low:
        return 0
    place = math.log(value / low) / math.log(high / low)
    return min(_NUM_SHADES - 1, int(place * _NUM_SHADES))


def _runs(shades: Sequence[int | None]) -> Iterator[tuple[int | None, int, int]]:
    """Yield each run of equal shades: the shade, the first index and the length."""
    start = 0
    for index in range(1, len(shades) + 1):
        if index == len(shades) or shades[index] != shades[start]:
            if shades[start] != _NO_CELL:
                yield shades[start], start, index - start
            start = index


def _fill(shade: int | None) -> str:
    if shade is None:
        return 'fill="var(--bad)"'
    return f'fill="var(--line-1)" fill-opacity="{0.08 + 0.92 * shade / (_NUM_SHADES - 1):.2f}"'


def _short_names(names: Sequence[str]) -> list[str]:
    """Return the ends of long names."""
    return [name if len(name) <= _MAX_LETTERS else f"…{name[1 - _MAX_LETTERS :]}" for name in names]

"""One curve in bounded memory: values by step, thinned so that no spike is lost."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import compress
from operator import itemgetter

__all__ = ["Curve", "Point", "fewer"]

Point = tuple[int, float | None]

_MAX_POINTS = 1000
"""Points of a full curve; at twice this number the curve is thinned."""
_step = itemgetter(0)


class Curve:
    """Values by step; None is a value that was not finite, and leaves a gap."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._steps, self._values = list[int](), list[float | None]()
        """The stretch at the end, which is not yet thinned."""
        self._length = 1
        """Points in a stretch, of which two are kept; three if it has a gap."""

    def extend(self, steps: Sequence[int], values: Sequence[float | None]) -> None:
        """Add the next points, after all others."""
        self._steps += steps
        self._values += values
        done = 0
        while len(self._steps) >= (end := done + self._length):
            self._points += _extremes(self._steps[done:end], self._values[done:end])
            self._thin_out()
            done = end
        if done:
            del self._steps[:done], self._values[:done]

    def put(self, point: Point) -> None:
        """Add a point at its step; it replaces the point that is there."""
        step, value = point
        last = self._steps[-1:] or [at for at, _ in self._points[-1:]]
        if not last or step > last[0]:
            self.extend([step], [value])
        elif self._steps and step >= self._steps[0]:
            at = bisect_left(self._steps, step)
            there = slice(at, at + (self._steps[at] == step))
            self._steps[there], self._values[there] = [step], [value]
        else:
            at = bisect_left(self._points, step, key=_step)
            there = slice(at, at + (at < len(self._points) and self._points[at][0] == step))
            self._points[there] = [point]
            self._thin_out()

    def go_back(self, step: int) -> None:
        """Remove all points after a step."""
        self._points = [point for point in self._points if point[0] <= step]
        kept = [each <= step for each in self._steps]
        self._steps = list(compress(self._steps, kept))
        self._values = list(compress(self._values, kept))

    def points(self) -> list[Point]:
        """Return the points in the order in which they came, or were put."""
        return self._points + _extremes(self._steps, self._values)

    def _thin_out(self) -> None:
        if len(self._points) >= 2 * _MAX_POINTS:
            self._points = _thinned(self._points, 4)
            self._length = max(4, 2 * self._length)


def fewer(points: Sequence[Point], most: int) -> Sequence[Point]:
    """Return at most about `most` points: the smallest and the largest of each stretch."""
    if len(points) <= most:
        return points
    return _thinned(points, 2 * -(-len(points) // most))


def _thinned(points: Sequence[Point], length: int) -> list[Point]:
    """Return the extremes of each stretch of so many points."""
    steps, values = zip(*points, strict=True)
    parts = [slice(at, at + length) for at in range(0, len(points), length)]
    return [point for part in parts for point in _extremes(steps[part], values[part])]


def _extremes(steps: Sequence[int], values: Sequence[float | None]) -> list[Point]:
    """Return the smallest and the largest, and the first gap, in their order."""
    if len(values) <= 2:
        return list(zip(steps, values, strict=True))
    try:
        low, high = values.index(min(values)), values.index(max(values))  # type: ignore[type-var]
    except TypeError:  # gaps
        finite = [value for value in values if value is not None]
        wanted = {None, *([min(finite), max(finite)] if finite else ())}
        return [(steps[at], values[at]) for at in sorted(map(values.index, wanted))]
    if low == high:
        return [(steps[low], values[low])]
    first, last = (low, high) if low < high else (high, low)
    return [(steps[first], values[first]), (steps[last], values[last])]

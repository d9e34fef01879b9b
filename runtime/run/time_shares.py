"""The shares of a run's time by part, as curves that are drawn on top of each other."""

from __future__ import annotations

from itertools import chain

import numpy as np

from ..trainer.step_clock import PARTS, STARTING, TITLES
from .curve import Curve, Point
from .record_schema import Group

__all__ = ["TimeShares"]

_SHOWN = [part for part in PARTS if part != STARTING]
_LEAST_PERCENT = 0.5
"""A part that never had as much has no curve."""


class TimeShares:
    """Percents of the time between two logs, without the time of starting."""

    def __init__(self) -> None:
        self._curves = {part: Curve() for part in _SHOWN}
        self._most = dict.fromkeys(_SHOWN, 0.0)

    def add(self, logs: Group) -> None:
        """Add logged records; of one without `parts` nothing is known."""
        divided = [point for point in zip(*logs.points("parts"), strict=True) if point[1]]
        if not divided:
            return
        known = set(chain.from_iterable(parts for _, parts in divided))
        seconds = np.zeros((len(_SHOWN), len(divided)))
        for row, part in zip(seconds, _SHOWN, strict=True):
            if part in known:
                row[:] = [parts.get(part) or 0.0 for _, parts in divided]
        seconds = seconds.clip(0)
        totals = seconds.sum(axis=0)
        timed = totals > 0
        shares = 100 * seconds[:, timed] / totals[timed]
        steps = [step for (step, _), has_time in zip(divided, timed, strict=True) if has_time]
        most, edges = shares.max(axis=1, initial=0.0).tolist(), shares.cumsum(axis=0).tolist()
        for part, share, edge in zip(_SHOWN, most, edges, strict=True):
            self._most[part] = max(self._most[part], share)
            self._curves[part].extend(steps, edge)

    def go_back(self, step: int) -> None:
        """Forget what came after that step."""
        for curve in self._curves.values():
            curve.go_back(step)

    def curves(self) -> list[tuple[str, list[Point]]]:
        """The title of each part, and its upper edge."""
        return [
            (TITLES[part], self._curves[part].points())
            for part in _SHOWN
            if self._most[part] >= _LEAST_PERCENT
        ]

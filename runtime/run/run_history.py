"""The history of a run in bounded memory: as many points as a page can show, for any length of run.

Records are read one after the other and dropped. Curves keep the smallest and the largest value of
each stretch, so that no spike is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .curve import Curve, Point
from .evaluation_rows import EvaluationRows
from .layer_maps import LayerMap, LayerMaps
from .lost_time import LostTime
from .record_file import RecordFile
from .record_schema import SYSTEM_FIGURES, Group, Record, grouped
from .time_shares import TimeShares

__all__ = ["FIGURES", "HistoryFile", "RunHistory"]

_MAX_CURVES = 200
_MAX_LOGGED = 500
"""Number of logged records that are kept unchanged."""
_MAX_NOT_FINITE = 20
"""Number of steps that were not finite of which the description is kept."""
_LOGGED, _TURN, _EVALUATED, _CLOCK = "logged", "turn", "evaluated", "clock"
_BEGINNINGS = ("run_started", "resumed", "warned")
FIGURES = ("loss", "learning_rate", "grad_norm", "items_per_second")
"""Numbers of each logged record that have a curve, besides `SYSTEM_FIGURES`."""


@dataclass
class RunHistory:
    """The records that led to the present weights. Steps after the checkpoint from which the run
    was later resumed are left out.
    """

    started: Record | None = None
    ended: Record | None = None
    """The last record of the newest run, if it has ended."""
    only_begun: bool = True
    """True if nothing was logged, saved or evaluated yet."""
    updated: float | None = None
    """The time of the last record, in seconds since 1970."""
    skipped: int = 0
    """Number of lines that were not records."""
    lost: LostTime = field(default_factory=LostTime)
    verdicts: Sequence[Record] = ()
    """Remarkable parts of the time of the newest run: `kind`, `share` and `text` of each."""
    memory: Record | None = None
    """The account of memory after the newest run's first step."""
    not_finite: deque[Record] = field(default_factory=lambda: deque(maxlen=_MAX_NOT_FINITE))
    """Descriptions of the newest steps that were not finite: `step` and `text` of each."""
    _began: float | None = None
    """The time at which the newest run began. `_seconds_before`: seconds of the runs before it."""
    _seconds_before: float = 0.0
    _without_curve: int = 0
    _rows: EvaluationRows = field(default_factory=EvaluationRows)
    _logged: deque[Record] = field(default_factory=lambda: deque(maxlen=_MAX_LOGGED))
    _curves: dict[tuple[str, str, str], Curve] = field(default_factory=dict)
    _shares: TimeShares = field(default_factory=TimeShares)
    _layers: LayerMaps = field(default_factory=LayerMaps)

    def add(self, records: Sequence[Record]) -> None:
        """Add the next records, which fit the schema."""
        for group in grouped(records):
            self.add_group(group)

    def add_group(self, group: Group) -> None:
        """Add the next records, which fit the schema."""
        if group.event not in _BEGINNINGS:
            self.only_begun = False
        if (at := group.records[-1].get("time")) is not None:
            self.updated = at
        self.lost.add(group)
        if group.event == _LOGGED:
            self._add_logged(group)
        elif (act := _ACTS.get(group.event)) is not None:
            act(self, group.records)

    def _add_logged(self, logs: Group) -> None:
        self._logged += logs.records
        for name in (*FIGURES, *SYSTEM_FIGURES):
            steps, values = logs.points(name)
            if values:
                self._add_points((_LOGGED, "", name), steps, values)
        for step, losses in zip(*logs.points("losses"), strict=True):
            if losses:
                for name, value in losses.items():
                    self._add_points((_TURN, "", name), [step], [value])
        self._shares.add(logs)
        self._add_clock(*logs.points("time"))

    def _add_clock(self, steps: Sequence[int], times: Sequence[float | None]) -> None:
        if None in times:
            steps = [step for step, at in zip(steps, times, strict=True) if at is not None]
        timed = [at for at in times if at is not None]
        if timed:
            if self._began is None:
                self._began = timed[0]
            more = self._seconds_before - self._began
            self._add_points((_CLOCK, "", ""), steps, [at + more for at in timed])

    def _add_evaluated(self, records: list[Record]) -> None:
        self._rows.add(records)
        for record in records:
            for name, value in record["metrics"].items():
                curve = self._curve((_EVALUATED, record["name"], name), 1)
                if curve is not None:
                    curve.put((record["step"], value))

    def _add_started(self, records: list[Record]) -> None:
        for record in records:
            self._go_back(record.get("first_step") or 0)
            self.started, self.ended, self._began = record, None, record.get("time")
            self.verdicts, self.memory = (), None
            self._seconds_before = max((at or 0.0 for _, at in self.clock()[-1:]), default=0.0)

    def _add_time_spent(self, records: list[Record]) -> None:
        self.verdicts = records[-1]["verdicts"]

    def _add_stats(self, records: list[Record]) -> None:
        self._layers.add(records)

    def _add_memory(self, records: list[Record]) -> None:
        self.memory = records[-1]

    def _add_not_finite(self, records: list[Record]) -> None:
        self.not_finite += records

    def _add_ended(self, records: list[Record]) -> None:
        self.ended = records[-1]

    @classmethod
    def of(cls, records: Sequence[Record]) -> RunHistory:
        """Build the history from these records."""
        made = cls()
        made.add(records)
        return made

    @property
    def rows(self) -> list[Record]:
        """Return the newest evaluations, by step; the last one of each step and data set."""
        return self._rows.newest()

    @property
    def left_out(self) -> int:
        """Count the evaluations before `rows`, and the figures without a curve, since there are too
        many."""
        return self._without_curve + self._rows.left_out

    @property
    def logged(self) -> Record | None:
        """Return the newest figures."""
        return self._logged[-1] if self._logged else None

    def figures(self, name: str) -> list[Point]:
        """Return the curve of one of `FIGURES` or `SYSTEM_FIGURES`."""
        curve = self._curves.get((_LOGGED, "", name))
        return curve.points() if curve else []

    def clock(self) -> list[Point]:
        """Return the running time at each step in seconds, without the time between a run and its
        resume. Empty if records have no time."""
        curve = self._curves.get((_CLOCK, "", ""))
        return curve.points() if curve else []

    def time_shares(self) -> list[tuple[str, list[Point]]]:
        """The name of each part of the time, and by step the percents of it and of those before
        it."""
        return self._shares.curves()

    def layer_maps(self) -> list[LayerMap]:
        """Maps of the statistics by layer and step."""
        return self._layers.maps()

    def turns(self) -> Iterator[tuple[str, list[Point]]]:
        """Return the name of each turn, and the curve of its loss."""
        for (kind, _, name), curve in self._curves.items():
            if kind == _TURN:
                yield name, curve.points()

    def evaluated(self) -> Iterator[tuple[str, str, list[Point]]]:
        """Yield the name of each evaluation data set, of each of its metrics, and the metric's
        curve."""
        for (kind, data, name), curve in self._curves.items():
            if kind == _EVALUATED:
                yield data, name, curve.points()

    def _add_points(
        self, key: tuple[str, str, str], steps: Sequence[int], values: Sequence[float | None]
    ) -> None:
        curve = self._curve(key, len(steps))
        if curve is not None:
            curve.extend(steps, values)

    def _curve(self, key: tuple[str, str, str], num_points: int) -> Curve | None:
        """Return the curve to add points to; None if there are too many curves."""
        curve = self._curves.get(key)
        if curve is None:
            if len(self._curves) >= _MAX_CURVES:
                self._without_curve += num_points
                return None
            curve = self._curves[key] = Curve()
        return curve

    def _go_back(self, step: int) -> None:
        for curve in self._curves.values():
            curve.go_back(step)
        self._curves = {key: curve for key, curve in self._curves.items() if curve.points()}
        self._rows.go_back(step)
        self._shares.go_back(step)
        self._layers.go_back(step)
        kept = [record for record in self._logged if record["step"] <= step]
        self._logged = deque(kept, maxlen=_MAX_LOGGED)
        found = [record for record in self.not_finite if record["step"] <= step]
        self.not_finite = deque(found, maxlen=_MAX_NOT_FINITE)


_ACTS: dict[str, Callable[[RunHistory, list[Record]], None]] = {
    "evaluated": RunHistory._add_evaluated,
    "run_started": RunHistory._add_started,
    "run_ended": RunHistory._add_ended,
    "memory_counted": RunHistory._add_memory,
    "time_spent": RunHistory._add_time_spent,
    "stats": RunHistory._add_stats,
    "non_finite_found": RunHistory._add_not_finite,
}


class HistoryFile:
    """The history in a file of records, which is read further as the file grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reopen()

    def _reopen(self) -> None:
        self._file, self._history = RecordFile(self.path), RunHistory()

    def read(self) -> RunHistory:
        """Return the history so far: the same object as long as the file is only appended to.
        Raises `OSError`."""
        if self._file.was_replaced():
            self._reopen()
        for group in self._file.groups():
            self._history.add_group(group)
        self._history.skipped = self._file.skipped
        return self._history

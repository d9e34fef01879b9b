"""The account of a run's hours over all of its starts: from its records, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import le

from ..trainer.step_clock import DATA, EVALUATION, SAVING, STARTING
from .record_schema import Group, Record

__all__ = ["KINDS", "LostTime", "whole_percents"]

TRAINING, AGAIN, STANDING = "training", "work done twice", "standing still"
KINDS = {
    TRAINING: "forward, backward, update, observers, and waiting for other ranks",
    EVALUATION: "",
    SAVING: "as long as training waits for it",
    "waiting for data": "",
    "starting": "from the start of a run, or a restart, to its first step",
    AGAIN: "steps that a restart, or a rollback, had to repeat",
    STANDING: "from the last record of a run to its restart, or after the death of ranks",
}
"""The kinds of time, and what counts as each."""
_OF_PART = {DATA: "waiting for data", EVALUATION: EVALUATION, SAVING: SAVING, STARTING: STARTING}
_BEFORE_START = ("resumed", "warned")
"""Events that a run may send before it has started."""
_MAX_SPANS = 2000


@dataclass
class _Span:
    """Steps after `first`, up to and with `last`, and their seconds by kind."""

    first: int
    last: int
    seconds: dict[str, float]

    def extend(self, last: int, seconds: Mapping[str, float]) -> None:
        """Add the next steps, up to and with `last`."""
        self.last = last
        for kind, more in seconds.items():
            self.seconds[kind] = self.seconds.get(kind, 0.0) + more


class LostTime:
    """The sums over the records that it was given, in their order."""

    def __init__(self) -> None:
        self._fixed = dict.fromkeys(KINDS, 0.0)
        self._spans: list[_Span] = []
        self._logs_in_span, self._in_newest = 1, 0
        self._step = 0
        self._pending: dict[str, float] = {}
        """Seconds of evaluations and saves since the last log."""
        self._counted_to: float | None = None
        """The time up to which all seconds are counted."""
        self._ranks_changed = False
        """True if ranks have died or joined, and have not started again yet."""
        self._seen: float | None = None
        """The time of the last record."""

    def add(self, group: Group) -> None:
        """The next records, which fit the schema."""
        event, own = group.event, group
        if group.columns is None or "evaluated_on" in group.columns:
            # the others are by another process, beside the run or after it
            own = Group(event, [each for each in group.records if "evaluated_on" not in each])
        if event == "logged":
            self._add_logs(own)
            return
        for record in own.records:
            if event == "run_started" and self._ranks_changed:
                self._ranks_changed = False  # the run continues, and so do its figures
            elif event == "run_started":
                self._started(record)
            elif event in ("rank_lost", "rejoined"):
                self._ranks_changed = True
            elif event == "reformed":
                self._fixed[STANDING] += _sound(record.get("seconds"))
                if record.get("steps_back"):
                    self._go_back(record["step"])
            elif event == "time_spent" and (rest := record.get("rest")):
                _add(self._fixed, [rest])
                self._counted_to, self._pending = record.get("time"), {}
            elif event == "rolled_back" and record.get("step") is not None:
                self._go_back(record["step"])
            elif event in ("saved", "evaluated"):
                kind = SAVING if event == "saved" else EVALUATION
                more = _sound(record.get("seconds"))
                self._pending[kind] = self._pending.get(kind, 0.0) + more
            if record.get("time") is not None and event not in _BEFORE_START:
                self._seen = record["time"]

    def seconds(self) -> dict[str, float]:
        """The seconds of each kind; empty where nothing was timed."""
        sums = dict(self._fixed)
        for span in self._spans:
            for kind, seconds in span.seconds.items():
                sums[kind] += seconds
        return {kind: seconds for kind, seconds in sums.items() if seconds > 0}

    def _started(self, record: Record) -> None:
        starting, at = _sound(record.get("starting_seconds")), record.get("time")
        if self._seen is not None:
            self._end_of_killed()
            began = record.get("began")
            if began is None and at is not None:
                began = at - starting
            if began is not None:
                self._fixed[STANDING] += max(0.0, began - self._seen)
        self._fixed[STARTING] += starting
        self._counted_to, self._pending = at, {}
        self._go_back(record.get("first_step") or 0)

    def _end_of_killed(self) -> None:
        """Count what a run did after its last log, where it could not say so at its end."""
        if self._seen is None or self._counted_to is None:
            return
        left = max(0.0, self._seen - self._counted_to)
        for kind, seconds in self._pending.items():
            self._fixed[kind] += min(seconds, left)
            left -= min(seconds, left)
        self._fixed[AGAIN] += left

    def _add_logs(self, logs: Group) -> None:
        """Add logs, as many at once as the newest span has room for."""
        steps, times, parts = map(logs.column, ("step", "time", "parts"))
        in_order = all(map(le, [self._step, *steps], steps))
        at = 0
        while at < len(steps):
            room = self._logs_in_span - self._in_newest or self._logs_in_span
            some = slice(at, at + (room if in_order else 1))
            seconds = self._seconds_of(times[some], parts[some])
            self._fixed[STARTING] += seconds.pop(STARTING, 0.0)
            first, last = min(self._step, steps[at]), steps[some][-1]
            self._add_span(first, last, seconds, len(steps[some]))
            self._step, self._pending = last, {}
            at = some.stop

    def _seconds_of(
        self, times: Sequence[float | None], divisions: Sequence[Mapping[str, float | None] | None]
    ) -> dict[str, float]:
        """Return the seconds of logs by kind."""
        divided, undivided = list[Mapping[str, float | None]](), 0.0
        before = self._counted_to
        for at, parts in zip(times, divisions, strict=True):
            if parts:
                divided.append(parts)
            elif at is not None and before is not None:  # of a version without parts
                undivided += at - before if at > before else 0.0
            before = at
            if at is not None:
                self._seen = at
        self._counted_to, seconds = before, {TRAINING: undivided} if undivided else {}
        _add(seconds, divided)
        return seconds

    def _add_span(self, first: int, last: int, seconds: dict[str, float], num_logs: int) -> None:
        """Add the time of steps to the newest span, while it has few logs, or begin another one."""
        room = self._logs_in_span - self._in_newest
        if num_logs <= room and self._spans and self._spans[-1].last == first:
            self._spans[-1].extend(last, seconds)
            self._in_newest += num_logs
            return
        self._spans.append(_Span(first, last, seconds))
        self._in_newest = num_logs
        if len(self._spans) > _MAX_SPANS:
            for span, following in zip(self._spans[::2], self._spans[1::2], strict=False):
                span.extend(following.last, following.seconds)
            self._spans = self._spans[::2]
            self._logs_in_span *= 2

    def _go_back(self, step: int) -> None:
        """The steps after that one are trained again."""
        kept = []
        for span in self._spans:
            if span.last > step:
                share = (span.last - max(step, span.first)) / max(1, span.last - span.first)
                for kind, seconds in span.seconds.items():
                    self._fixed[AGAIN] += share * seconds
                    span.seconds[kind] = (1 - share) * seconds
                span.last = min(span.last, step)
            if span.first < step:
                kept.append(span)
        self._spans, self._step = kept, step


def _add(sums: dict[str, float], divided: Sequence[Mapping[str, float | None]]) -> None:
    """Add the seconds of each part to the sum of its kind."""
    for part in dict.fromkeys(chain.from_iterable(divided)):
        seconds = [each for parts in divided if (each := parts.get(part) or 0.0) > 0]
        kind = _OF_PART.get(part, TRAINING)
        sums[kind] = sums.get(kind, 0.0) + sum(seconds)


def _sound(seconds: float | None) -> float:
    return max(0.0, seconds or 0.0)


def whole_percents(seconds: Mapping[str, float]) -> dict[str, int]:
    """Whole percents that add up to 100, by the method of the largest remainders."""
    total = sum(seconds.values())
    if total <= 0:
        return {}
    exact = {kind: 100 * each / total for kind, each in seconds.items()}
    found = {kind: int(each) for kind, each in exact.items()}
    left = 100 - sum(found.values())
    for kind in sorted(exact, key=lambda kind: found[kind] - exact[kind])[:left]:
        found[kind] += 1
    return found

"""The clock of a run: each second belongs to one part, so that the parts add up to the whole.

Times are those of the host. On an accelerator the host runs ahead of the device, and the time of
the device shows where the host waits for it anyway; the clock itself waits for nothing.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ..kernel.contract import Session
from ..kernel.optional import CountsWaits

__all__ = [
    "COMPUTE",
    "COPY",
    "DATA",
    "EVALUATION",
    "OBSERVERS",
    "PARTS",
    "RANKS",
    "SAVING",
    "STARTING",
    "TITLES",
    "UPDATE",
    "StepClock",
]

STARTING, DATA, COPY, COMPUTE = "starting", "data", "copy", "compute"
RANKS, UPDATE, EVALUATION = "ranks", "update", "evaluation"
SAVING, OBSERVERS = "saving", "observers"
TITLES = {
    DATA: "waiting for data",
    COPY: "copy to the device",
    COMPUTE: "forward and backward",
    RANKS: "waiting for other ranks",
    UPDATE: "update",
    EVALUATION: "evaluation",
    SAVING: "saving",
    OBSERVERS: "observers",
    STARTING: "starting",
}
"""The name of each part on a page."""
PARTS = tuple(TITLES)

_SHARED = frozenset({DATA, COPY, COMPUTE, UPDATE})
"""Parts of which the time in calls that wait for other ranks is taken out."""
_NUM_LONGEST = 3


class StepClock:
    """Time belongs to `part` until `mark` names another one. To be used by the `thread` that made
    it."""

    def __init__(self) -> None:
        self.part = STARTING
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._total = dict.fromkeys(PARTS, 0.0)
        self._longest = [0.0] * _NUM_LONGEST
        self._observers, self._names = dict[int, float](), dict[int, str]()
        self.thread = threading.get_ident()
        self._session: CountsWaits | None = None
        self._since, self._waited = time.perf_counter(), 0.0

    def watch(self, session: Session) -> None:
        """Take the time that this session waits for other ranks out of the parts in which it
        waits."""
        if session.world.size > 1 and isinstance(session, CountsWaits):
            self._session, self._waited = session, session.waited_seconds

    def mark(self, part: str) -> str:
        """Let the time from now on belong to `part`; returns the part before."""
        now, before = time.perf_counter(), self.part
        spent = now - self._since
        if self._session is not None:
            waited = self._session.waited_seconds
            if before in _SHARED:
                others = min(spent, waited - self._waited)
                self._seconds[RANKS] += others
                spent -= others
            self._waited = waited
        if before == DATA and spent > self._longest[0]:
            heapq.heapreplace(self._longest, spent)
        self._seconds[before] += spent
        self._since, self.part = now, part
        return before

    def instead(self, part: str) -> None:
        """Let the time since the last mark, and from now on, belong to `part`."""
        self.part = part

    @property
    def longest_waits(self) -> tuple[float, ...]:
        """The seconds of the three longest waits for data."""
        return tuple(self._longest)

    def forget_waits(self) -> None:
        """Forget the longest waits for data so far."""
        self._longest = [0.0] * _NUM_LONGEST

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Let the time of the block belong to `part`."""
        before = self.mark(part)
        try:
            yield
        finally:
            self.mark(before)

    @contextmanager
    def observing(self, observer: object) -> Iterator[None]:
        """Count the time in the block for an observer."""
        before, since = self.mark(OBSERVERS), time.perf_counter()
        yield
        self.observed(observer, since)
        self.mark(before)

    def observed(self, observer: object, since: float) -> float:
        """Count the time since `since` for an observer; returns the time now."""
        now = time.perf_counter()
        key = id(observer)  # which may have no hash
        if key not in self._observers:
            self._observers[key] = 0.0
            self._names[key] = getattr(observer, "__name__", type(observer).__name__)
        self._observers[key] += now - since
        return now

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds of parts that another clock of the run has taken."""
        for part, more in seconds.items():
            self._seconds[part] += more

    def take(self) -> dict[str, float]:
        """The seconds of each part since the last call, but of those without any."""
        self.mark(self.part)
        taken = {part: seconds for part, seconds in self._seconds.items() if seconds}
        for part, seconds in taken.items():
            self._total[part] += seconds
            self._seconds[part] = 0.0
        return taken

    def totals(self) -> Mapping[str, float]:
        """The seconds of each part since the clock was made."""
        self.mark(self.part)
        return {part: self._total[part] + self._seconds[part] for part in PARTS}

    def of_observers(self) -> Mapping[str, float]:
        """The seconds of each observer since the clock was made, by name."""
        named: dict[str, float] = {}
        for key, seconds in self._observers.items():
            name = self._names[key]
            named[name] = named.get(name, 0.0) + seconds
        return named

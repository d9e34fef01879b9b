"""Detects ranks that make no progress while others wait for them. Late ranks are named; dead ranks
end the run.

Each rank has two threads for this; neither touches the device or delays a step. One publishes in
the store, a few times in `stall_seconds`, that this process lives, when it last worked and where
its main thread is. The other reads only the clock, since the store itself may not answer.

When a rank has waited in a call for `stall_seconds`, a rank that did not come is

- silent: stopped, dead, or cut off. The run ends.
- late: it is alive and reports that it is in the user's code: a debugger, a request to a server, a
  slow disk. It is named, and waited for until `timeout_seconds`.

The run also ends if no rank is late, all ranks wait in calls, and no process or child of one uses
the processor: then ranks wait for each other in different calls. This is not checked before the
second step, while models are fetched and compiled. While saving and resuming, where one rank may
wait for a slow disk, only a silent rank ends the run."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import math
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from ... import lost_ranks
from . import start, used_layers
from .abort import Abort, acknowledged_key, end_process
from .heartbeats import ABSENT_HEARTBEAT, JOINED, Heartbeat, Late, place_of, processor_seconds
from .waits import Waits

BUSY = 0.02
"""Share of wall time below which a process counts as idle."""
GRACE_SECONDS = 5.0
"""Time for a call to fail by itself, on a rank that has received the reason why it must."""
PATIENT_STEPS = 2
"""Steps before idle ranks are looked for."""


def print_late(late: Late) -> None:
    """Print a late rank on stderr, on the rank that waits; used while there is no observer."""
    if (watch := this_session()) is not None and watch.rank == late.by:
        message = f"rank {late.rank} has kept others waiting for {late.seconds:.0f} s: {late}"
        print(message, file=sys.stderr, flush=True)


class Watch:
    """Watches the other ranks for this one. `store`: a connection of its own, since its calls must
    not wait for those of another thread. `main_store`: the same keys, for the main thread.
    With infinite `stall_seconds`, only ranks that abort are detected."""

    def __init__(
        self,
        store: Any,
        main_store: Any,
        rank: int,
        size: int,
        stall_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self.rank, self.stall_seconds = rank, stall_seconds
        self.timeout_seconds = timeout_seconds
        self.report: Callable[[Late], None] = print_late
        self.steps = 0
        self.waits = Waits()
        self.verdict = ""
        """The report on the ranks that stall; empty while none does."""
        self.stalled: Sequence[int] = ()
        self.peer_aborted = False
        """True once a rank has aborted; it takes part in no call any more."""
        self._reported_late: tuple[int, int] | None = None
        self._store, self._main_store = store, main_store
        self._others = [other for other in range(size) if other != rank]
        self._has_aborted, self._abort = False, Abort(main_store, rank, self._others)
        self._since = 0.0
        self._call, self._patient, self._mixed = "", False, False
        self._main = threading.get_ident()
        self._stopped = threading.Event()
        self._last_answer = time.monotonic()  # when the store last answered
        self._seen: dict[int, tuple[int, float]] = {}  # a rank's beat, and when it was first seen
        self._threads = [
            threading.Thread(target=loop, name=f"drivetrain-{name}", daemon=True)
            for name, loop in (("watch", self._publish_and_check), ("clock", self._read_clock))
            if name == "watch" or math.isfinite(stall_seconds)
        ]

    def start(self) -> None:
        """Start the threads. Called once, by the main thread."""
        self._publish(Heartbeat(-1, 0.0, 0, "", "its start"))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop watching, before ranks leave."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(1.0)

    def stop_joined(self) -> None:
        """Stop watching once this rank has joined the process group, which others may still wait
        for."""
        self.stop()
        self._main_store.set(_key(self.rank), json.dumps(asdict(Heartbeat(JOINED, 0.0, 0, "", ""))))

    def enter(self, call: str, patient: bool, mixed: bool) -> tuple[str, float, bool, bool]:
        """Note that the main thread begins a call that needs other ranks. Returns the state for
        `leave`. `mixed`: the call computes, and runs the user's code, too."""
        before = self._call, self._since, self._patient, self._mixed
        self._since, self._patient, self._mixed = time.monotonic(), patient, mixed
        self._call = call
        return before

    def leave(self, before: tuple[str, float, bool, bool]) -> None:
        """Note that the main thread has returned to its previous call."""
        if not self._mixed and (before[3] or not before[0]):  # a wait, and not within another one
            self.waits.seconds += time.monotonic() - self._since
        self._call, self._since, self._patient, self._mixed = before

    def abort(self, why: str, retry: bool) -> bool:
        """See `WatchesRanks`. Called by the main thread."""
        if self._has_aborted or self.verdict:
            return False
        if retry and self._abort.all_abort(self.stall_seconds / 3):
            return True
        self._has_aborted = True
        self._abort.report(why, 1.5 * self._pause)
        return False

    @property
    def _pause(self) -> float:
        """Seconds between two looks at the store."""
        return min(self.stall_seconds / 10, 2.0)

    # --- the thread that publishes ----------------------------------------------------------

    def _publish_and_check(self) -> None:
        try:
            for heartbeat in self._heartbeats():
                self._publish(heartbeat)
                if not self._has_aborted and self._store.check(["verdict"]):
                    self._receive_verdict(**json.loads(self._store.get("verdict")))
                if self._store.check(["late"]):
                    self._report_late(Late(**json.loads(self._store.get("late"))))
                self._last_answer = time.monotonic()
                self._check_others(heartbeat)
        except RuntimeError:
            return  # the store is gone, with its process: every call of the main thread fails now

    def _publish(self, heartbeat: Heartbeat) -> None:
        self._store.set(_key(self.rank), json.dumps(asdict(heartbeat)))

    def _heartbeats(self) -> Iterator[Heartbeat]:
        """Yield this rank's heartbeats, a few in `stall_seconds`, until it stops."""
        worked = looked = time.monotonic()
        used = processor_seconds()
        for beat in itertools.count():
            if self._stopped.wait(self._pause):
                return
            now, uses = time.monotonic(), processor_seconds()
            if abs(uses - used) > BUSY * (now - looked):  # less: a child has ended
                worked = now
            looked, used = now, uses
            yield Heartbeat(beat, now - worked, self.steps, self._call, *place_of(self._main))

    def _check_others(self, mine: Heartbeat) -> None:
        """Look at the other ranks once this rank has waited for a while."""
        limit = self.stall_seconds
        waited = time.monotonic() - self._since if self._call and not mine.own else 0.0
        if waited < limit / 3:
            self._seen.clear()
            return
        if self._seen and waited < limit:
            return
        heartbeats = self._read_heartbeats()
        if silent := self._silent(heartbeats):
            self._report_stall(silent, f"sees no sign of life for {limit:g} s (stall_seconds)")
        elif waited >= limit and not self._patient and not self._works(mine):
            self._find_late(heartbeats, mine, waited)

    def _works(self, mine: Heartbeat) -> bool:
        """Return True if this rank computes within its call."""
        return self._mixed and mine.idle_seconds < self.stall_seconds

    def _silent(self, heartbeats: Mapping[int, Heartbeat]) -> dict[int, Heartbeat]:
        """Return the ranks that have published nothing for half of `stall_seconds`."""
        silent, now = {}, time.monotonic()
        for other, last in heartbeats.items():
            beat, since = self._seen.setdefault(other, (last.beat, now))
            if beat != last.beat or not last.is_renewed:
                self._seen[other] = last.beat, now
            elif now - since >= self.stall_seconds / 2:
                silent[other] = last
        return silent

    def _find_late(
        self, heartbeats: Mapping[int, Heartbeat], mine: Heartbeat, waited: float
    ) -> None:
        limit = self.stall_seconds
        late = {other: last for other, last in heartbeats.items() if last.late}
        if late and waited >= self.timeout_seconds:
            self._report_stall(late, f"has waited for {self.timeout_seconds:g} s (timeout_seconds)")
        elif late:
            other, last = min(late.items())
            self._publish_late(Late(other, waited, last.steps, last.place, self.rank, self._call))
        elif heartbeats and all(
            h.is_renewed and h.idle_seconds >= limit and h.steps >= PATIENT_STEPS
            for h in (mine, *heartbeats.values())
        ):  # all are alive, and none works
            what = f"sees no sign of work for {limit:g} s (stall_seconds)"
            self._report_stall({**heartbeats, self.rank: mine}, what)

    def _publish_late(self, late: Late) -> None:
        if self._reported_late != late.key:
            self._store.set("late", json.dumps(asdict(late)))
            self._report_late(late)

    def _report_late(self, late: Late) -> None:
        """Report a late rank, once on each rank, whichever rank found it first."""
        if self._reported_late != late.key:
            self._reported_late = late.key
            self.report(late)

    def _read_heartbeats(self) -> dict[int, Heartbeat]:
        keys = [_key(other) for other in self._others]
        if not self._store.check(keys):  # one has yet to begin
            keys = [key for key in keys if self._store.check([key])]
        found = dict(zip(keys, self._store.multi_get(keys), strict=True)) if keys else {}
        return {
            other: Heartbeat(**json.loads(found[key])) if key in found else ABSENT_HEARTBEAT
            for other, key in ((other, _key(other)) for other in self._others)
        }

    def _report_stall(self, stalled: Mapping[int, Heartbeat], seen: str) -> None:
        if self.rank not in stalled:
            cut_off = [lost_ranks.cut_off(other) for other in stalled]
            if all(cut_off):
                return  # they are reported as dead, and the others continue
        lines = [f"rank {other} {sign}" for other, sign in sorted(stalled.items())]
        text = f"{'; '.join(lines)}. Rank {self.rank} waits for it in {self._call!r} and {seen}"
        text += f". {used}".rstrip(".") if (used := used_layers.describe_difference()) else ""
        self._store.set("verdict", json.dumps({"stalled": sorted(stalled), "text": text}))
        self._end(sorted(stalled), text)

    # --- the thread that reads the clock ----------------------------------------------------

    def _read_clock(self) -> None:
        while not self._stopped.wait(self.stall_seconds / 10):
            now = time.monotonic()
            waited = now - self._since if self._call else 0.0
            if min(waited, now - self._last_answer) >= self.stall_seconds + GRACE_SECONDS:
                address = ":".join(os.environ.get(f"MASTER_{x}", "?") for x in ("ADDR", "PORT"))
                self._end(
                    (),
                    f"the store at {address}, in the process of rank 0 or of the launcher, does "
                    f"not answer; rank {self.rank} waits in {self._call!r}",
                )

    def _receive_verdict(self, stalled: Sequence[int], text: str, left: bool = False) -> None:
        self.verdict, self.stalled, self.peer_aborted = text, stalled, left
        self._store.set(acknowledged_key(self.rank), "1")
        self._end(stalled, text)

    def _end(self, stalled: Sequence[int], text: str) -> None:
        """End this process: at once if it stalls, else if it does not end by itself."""
        self.verdict, self.stalled = text, stalled
        stalls = self.rank in stalled
        if stalls or not self._ends_by_itself():
            end_process(self.rank, text, stacks=stalls, reported_elsewhere=self.peer_aborted)

    def _ends_by_itself(self) -> bool:
        """Return True once this rank has ended. Its call fails a moment after the other end is
        gone; before a call, it may be finishing something. A rank that aborted has its own error to
        report."""
        received, grace = time.monotonic(), GRACE_SECONDS * (2 if self.peer_aborted else 1)
        while not self._stopped.wait(0.1):
            now = time.monotonic()
            waited = now - max(received, self._since) if self._call else 0.0
            if waited >= grace or now - received >= self.timeout_seconds:
                return False
        return True


def _key(rank: int) -> str:
    """Return the key under which a rank publishes its heartbeat."""
    return f"heartbeat/{rank}"


# --- one at a time --------------------------------------------------------------------------

_open: list[Watch] = []
broken: list[str] = []
"""Failed calls, and reasons of aborts, since ranks joined. If there are any, no rank waits for the
others at the end."""
_num_watches: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
"""The next number of a watch, by `lost_ranks.generation`."""


@contextlib.contextmanager
def watching(
    store: Any,
    rank: int,
    size: int,
    stall_seconds: float | None,
    timeout_seconds: float,
    joins: bool = False,
) -> Iterator[None]:
    """Watch the ranks within the block. `store`: the process group's; every rank opens its watches
    in the same order. A single rank watches nothing. `joins`: ranks join the process group in the
    block."""
    if size == 1:
        yield
        return
    prefix = f"drivetrain/watch {next(_num_watches[lost_ranks.generation()])}"
    own: Any = dist.PrefixStore(prefix, start.second_client(store))  # type: ignore[attr-defined]
    main: Any = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    stall = math.inf if stall_seconds is None else stall_seconds
    watch = Watch(own, main, rank, size, stall, timeout_seconds)
    _open.append(watch)
    watch.start()
    try:
        with _fatal_errors_placed():
            yield
        if joins:
            watch.stop_joined()
    finally:
        _open.remove(watch)
        watch.stop()


@contextlib.contextmanager
def _fatal_errors_placed() -> Iterator[None]:
    """Let Python print the stacks when a library aborts the process. gloo does so when ranks make
    different calls, and does not say where."""
    output = sys.__stderr__
    if faulthandler.is_enabled() or output is None:
        yield
        return
    faulthandler.enable(output)
    try:
        yield
    finally:
        faulthandler.disable()


def this_session() -> Watch | None:
    """Return the watch that reports calls which need the other ranks (`Watch.enter`); None with one
    rank."""
    return _open[-1] if _open else None


def listen(report: Callable[[Late], None]) -> None:
    """Call `report` for late ranks from now on, in another thread, instead of printing them."""
    for watch in _open:
        watch.report = report


def abort(why: str, retry: bool) -> bool:
    """See `WatchesRanks`; True with one rank."""
    together = _open[-1].abort(why, retry) if _open else True
    if not together:
        broken.append(why)
    return together


def count_step() -> None:
    """Count a step; called once in each."""
    for watch in _open:
        watch.steps += 1


def rank_aborted() -> bool:
    """Return True if a rank has aborted, so that waiting for it is useless."""
    return bool(_open) and _open[-1].peer_aborted


def verdict() -> tuple[str, Sequence[int]]:
    """Return the report on the ranks that stall, and their numbers; empty while none does."""
    return (_open[-1].verdict, _open[-1].stalled) if _open else ("", ())

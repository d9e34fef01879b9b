"""Notices ranks that stand still while others wait for them; names late ranks, ends the run for
dead ones.

Two threads of each rank, neither of which touches the device or delays a step. One publishes in the
store, a few times in `stall_seconds`, that this process lives, when it last worked and where its
main thread is. The other reads the clock alone, since the store may be what stands still.

When a rank has waited in a call for `stall_seconds`, another that did not come is

- silent: stopped, dead, or cut off. The run ends.
- late: it lives, and is in the user's code, as it says itself: a debugger, a server that is asked,
  a slow disk. It is named, and waited for until `timeout_seconds`.

Where no rank is late, all wait in calls, and no process nor child of one uses the processor, ranks
wait for each other in different calls, and the run ends. That is not judged before the second step,
while models are fetched and compiled. In saving and resuming, where one rank may wait for a slow
disk, only silence ends the run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from . import layers_used
from .giving_up import GivingUp, heard
from .signs_of_life import Heartbeat, Late, processor_seconds

BUSY = 0.02
"""Of the time: a process that uses less of a processor than this is idle."""
GRACE_SECONDS = 5.0
"""For a call to fail by itself, on a rank that has learnt why it must."""
PATIENT_STEPS = 2
"""Steps before idling is judged."""


def print_late(late: Late) -> None:
    """Print a late rank on stderr, where no observer is told; called by the rank that waits."""
    if (watch := this_session()) is not None and watch.rank == late.by:
        words = f"rank {late.rank} has kept others waiting for {late.seconds:.0f} s: {late}"
        print(words, file=sys.stderr, flush=True)


_TALKS = re.compile(
    r"[/\\](torch[/\\](distributed|autograd|_ops\.py)|deepspeed[/\\])|"
    + re.escape(str(Path(__file__).parent))
)
"""Files of code that waits for other ranks, or computes."""


class Watch:
    """Watches the other ranks for this one. `store`: of its own, for no call of it may wait for a
    call of another thread; `mains`: the same keys, for the main thread. With `stall_seconds` of
    infinity it hears of ranks that give up, and of nothing else.
    """

    def __init__(
        self,
        store: Any,
        mains: Any,
        rank: int,
        size: int,
        stall_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self.rank, self.stall_seconds = rank, stall_seconds
        self.timeout_seconds = timeout_seconds
        self.tell: Callable[[Late], None] = print_late
        self.steps = 0
        self.verdict = ""
        """The report on the ranks that stall; empty while none does."""
        self.stalled: Sequence[int] = ()
        self.is_left = False
        """By a rank that gave up, and answers nothing any more."""
        self._told_late: tuple[int, int] | None = None
        self._store = store
        self._others = [other for other in range(size) if other != rank]
        self._gave_up, self._giving_up = False, GivingUp(mains, rank, self._others)
        self._since = 0.0
        self._call, self._patient, self._mixed = "", False, False
        self._main = threading.get_ident()
        self._stopped = threading.Event()
        self._told = time.monotonic()  # when the store last answered
        self._seen: dict[int, tuple[int, float]] = {}  # a rank's beat, and when it was first seen
        self._threads = [
            threading.Thread(target=loop, name=f"drivetrain-{name}", daemon=True)
            for name, loop in (("watch", self._tell_and_look), ("clock", self._read_clock))
            if name == "watch" or math.isfinite(stall_seconds)
        ]

    def start(self) -> None:
        """Called once, by the main thread."""
        self._tell(Heartbeat(-1, 0.0, 0, "", "its start"))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop watching, before ranks leave."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(1.0)

    def enter(self, call: str, patient: bool, mixed: bool) -> tuple[str, float, bool, bool]:
        """The main thread begins what needs the other ranks; the answer is for `leave`. `mixed`: it
        computes, and runs the user's code, too."""
        before = self._call, self._since, self._patient, self._mixed
        self._since, self._patient, self._mixed = time.monotonic(), patient, mixed
        self._call = call
        return before

    def leave(self, before: tuple[str, float, bool, bool]) -> None:
        """It is back in what it did before."""
        self._call, self._since, self._patient, self._mixed = before

    def give_up(self, why: str, retry: bool) -> bool:
        """See `WatchesRanks`. Called by the main thread."""
        if self._gave_up or self.verdict:
            return False
        if retry and self._giving_up.all_do(self.stall_seconds / 3):
            return True
        self._gave_up = True
        self._giving_up.tell(why, 1.5 * self._pause)
        return False

    @property
    def _pause(self) -> float:
        """Seconds between two looks at the store."""
        return min(self.stall_seconds / 10, 2.0)

    # --- the thread that talks --------------------------------------------------------------

    def _tell_and_look(self) -> None:
        try:
            for sign in self._signs():
                self._tell(sign)
                if not self._gave_up and self._store.check(["verdict"]):
                    self._hear(**json.loads(self._store.get("verdict")))
                if self._store.check(["late"]):
                    self._hear_of_late(Late(**json.loads(self._store.get("late"))))
                self._told = time.monotonic()
                self._look(sign)
        except RuntimeError:
            return  # the store is gone, with its process: every call of the main thread fails now

    def _tell(self, sign: Heartbeat) -> None:
        self._store.set(f"sign/{self.rank}", json.dumps(asdict(sign)))

    def _signs(self) -> Iterator[Heartbeat]:
        """This rank's own, a few times in `stall_seconds`, until it stops."""
        worked = looked = time.monotonic()
        used = processor_seconds()
        for beat in itertools.count():
            if self._stopped.wait(self._pause):
                return
            now, uses = time.monotonic(), processor_seconds()
            if abs(uses - used) > BUSY * (now - looked):  # less: a child has ended
                worked = now
            looked, used = now, uses
            frame = sys._current_frames().get(self._main)
            own = frame is not None and not _TALKS.search(frame.f_code.co_filename)
            yield Heartbeat(beat, now - worked, self.steps, self._call, self._place(frame), own)

    def _place(self, frame: FrameType | None) -> str:
        places: list[str] = []
        while frame is not None and len(places) < 3:
            code = frame.f_code
            places.append(f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}")
            frame = frame.f_back
        return ", called from ".join(places)

    def _look(self, mine: Heartbeat) -> None:
        """Look at the other ranks once this rank has waited for a while."""
        limit = self.stall_seconds
        waited = time.monotonic() - self._since if self._call and not mine.own else 0.0
        if waited < limit / 3:
            self._seen.clear()
            return
        if self._seen and waited < limit:
            return
        signs = self._ask()
        if silent := self._silent(signs):
            self._report_stall(silent, f"sees no sign of life for {limit:g} s (stall_seconds)")
        elif waited >= limit and not self._patient and not self._works(mine):
            self._look_for_late(signs, mine, waited)

    def _works(self, mine: Heartbeat) -> bool:
        """True if this rank works in what looks like a call."""
        return self._mixed and mine.idle_seconds < self.stall_seconds

    def _silent(self, signs: Mapping[int, Heartbeat]) -> dict[int, Heartbeat]:
        """Those that nothing has come of for half of the time."""
        silent, now = {}, time.monotonic()
        for other, sign in signs.items():
            beat, since = self._seen.setdefault(other, (sign.beat, now))
            if beat != sign.beat:
                self._seen[other] = sign.beat, now
            elif now - since >= self.stall_seconds / 2:
                silent[other] = sign
        return silent

    def _look_for_late(
        self, signs: Mapping[int, Heartbeat], mine: Heartbeat, waited: float
    ) -> None:
        limit = self.stall_seconds
        late = {other: sign for other, sign in signs.items() if sign.late}
        if late and waited >= self.timeout_seconds:
            self._report_stall(late, f"has waited for {self.timeout_seconds:g} s (timeout_seconds)")
        elif late:
            other, sign = min(late.items())
            self._store_late(Late(other, waited, sign.steps, sign.place, self.rank, self._call))
        elif signs and all(
            s.idle_seconds >= limit and s.steps >= PATIENT_STEPS for s in (mine, *signs.values())
        ):  # all are there, and nothing moves
            what = f"sees no sign of work for {limit:g} s (stall_seconds)"
            self._report_stall({**signs, self.rank: mine}, what)

    def _store_late(self, late: Late) -> None:
        if self._told_late != late.key:
            self._store.set("late", json.dumps(asdict(late)))
            self._hear_of_late(late)

    def _hear_of_late(self, late: Late) -> None:
        """Announce a late rank, once on each rank, whichever found it first."""
        if self._told_late != late.key:
            self._told_late = late.key
            self.tell(late)

    def _ask(self) -> dict[int, Heartbeat]:
        keys = [f"sign/{other}" for other in self._others]
        if not self._store.check(keys):
            return {}  # one has yet to begin
        told = self._store.multi_get(keys)
        return {o: Heartbeat(**json.loads(t)) for o, t in zip(self._others, told, strict=True)}

    def _report_stall(self, stalled: Mapping[int, Heartbeat], seen: str) -> None:
        lines = [
            f"rank {other} stands still after {sign.steps} steps"
            + (f", in {sign.call}" if sign.call else "")
            + f", last seen at {sign.place}"
            for other, sign in sorted(stalled.items())
        ]
        text = f"{'; '.join(lines)}. Rank {self.rank} waits for it in {self._call!r} and {seen}"
        text += f". {used}".rstrip(".") if (used := layers_used.told()) else ""
        self._store.set("verdict", json.dumps({"stalled": sorted(stalled), "text": text}))
        self._end(sorted(stalled), text)

    # --- the thread that reads the clock ----------------------------------------------------

    def _read_clock(self) -> None:
        while not self._stopped.wait(self.stall_seconds / 10):
            now = time.monotonic()
            waited = now - self._since if self._call else 0.0
            if min(waited, now - self._told) >= self.stall_seconds + GRACE_SECONDS:
                address = ":".join(os.environ.get(f"MASTER_{x}", "?") for x in ("ADDR", "PORT"))
                self._end(
                    (),
                    f"the store at {address}, in the process of rank 0 or of the launcher, does "
                    f"not answer; rank {self.rank} waits in {self._call!r}",
                )

    def _hear(self, stalled: Sequence[int], text: str, left: bool = False) -> None:
        self.verdict, self.stalled, self.is_left = text, stalled, left
        self._store.set(heard(self.rank), "1")
        self._end(stalled, text)

    def _end(self, stalled: Sequence[int], text: str) -> None:
        """End this process: at once where it stalls, else when it does not end by itself."""
        self.verdict, self.stalled = text, stalled
        if self.rank not in stalled and self._ends_by_itself():
            return
        print(f"error: rank {self.rank} on {socket.gethostname()}: {text}.", file=sys.stderr)
        print("What each thread is doing:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
        os._exit(1)

    def _ends_by_itself(self) -> bool:
        """True once it has. A call fails a moment after the other end has gone away; before one,
        this rank may be finishing something."""
        heard = time.monotonic()
        while not self._stopped.wait(0.1):
            now = time.monotonic()
            waited = now - max(heard, self._since) if self._call else 0.0
            if waited >= GRACE_SECONDS or now - heard >= self.timeout_seconds:
                return False
        return True


# --- one at a time --------------------------------------------------------------------------

_open: list[Watch] = []
_num_watches = itertools.count()


@contextlib.contextmanager
def watching(
    store: Any, rank: int, size: int, stall_seconds: float | None, timeout_seconds: float
) -> Iterator[None]:
    """Watch the ranks while the block runs. `store`: the process group's; every rank opens its
    watches in the same order. With one rank nothing is watched."""
    if size == 1:
        yield
        return
    prefix = f"drivetrain/watch {next(_num_watches)}"
    own: Any = dist.PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
    main: Any = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    stall = math.inf if stall_seconds is None else stall_seconds
    watch = Watch(own, main, rank, size, stall, timeout_seconds)
    _open.append(watch)
    watch.start()
    try:
        with _fatal_errors_placed():
            yield
    finally:
        _open.remove(watch)
        watch.stop()


@contextlib.contextmanager
def _fatal_errors_placed() -> Iterator[None]:
    """A library that aborts the process, as gloo does when ranks do not make the same calls, says
    nothing of where that was: have Python add it.
    """
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
    """Whom to tell of a call that needs the other ranks (`Watch.enter`); None with one rank."""
    return _open[-1] if _open else None


def listen(tell: Callable[[Late], None]) -> None:
    """Call `tell` for late ranks from now on, in another thread, instead of printing them."""
    for watch in _open:
        watch.tell = tell


def give_up(why: str, retry: bool) -> bool:
    """See `WatchesRanks`; True with one rank."""
    return _open[-1].give_up(why, retry) if _open else True


def count_step() -> None:
    """Once a step."""
    for watch in _open:
        watch.steps += 1


def is_left() -> bool:
    """A rank has given up, and is waited for in vain."""
    return bool(_open) and _open[-1].is_left


def verdict() -> tuple[str, Sequence[int]]:
    """The report on the ranks that stall, and their numbers; empty while none does."""
    return (_open[-1].verdict, _open[-1].stalled) if _open else ("", ())

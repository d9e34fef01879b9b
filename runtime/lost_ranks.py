"""Ranks that die, or join, while the others of the run continue.

A launcher that lets a run outlive its ranks opens a `Board` and gives each rank a pipe. It writes
a line to the pipes whenever a rank has died or has joined. A thread of each rank reads them, so
that a survivor knows within milliseconds, whatever its main thread waits for. On the board, which
is memory that all ranks share, each rank notes what the others need when it dies. After each change
the ranks take new numbers, from 0 on: those that are left in the old order, then those that have
joined (`renumber`).

A spare is a process of the launcher's without a rank. It waits until it takes the place of a dead
rank (`await_place`). If it is ready at a death, the launcher reports the death and the new rank at
once. Otherwise the ranks learn that a spare waits (`spare_waits`), and let it join at the end of a
step (`admit`).

Without such a launcher nothing here has any effect. This module imports the standard library alone.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = [
    "CHANNEL",
    "SPARES",
    "Board",
    "Change",
    "News",
    "Noted",
    "admit",
    "await_new",
    "await_place",
    "board",
    "channel",
    "cut_off",
    "generation",
    "is_new",
    "is_reported",
    "is_spare",
    "joined",
    "launched_number",
    "listen",
    "lost",
    "members",
    "newly_lost",
    "num_missing",
    "own_number",
    "renumber",
    "shared_folder",
    "spare_waits",
    "waking",
]

CHANNEL = "DRIVETRAIN_LOST_RANKS"
"""Environment: the descriptors of the pipe from the launcher, of the pipe to it, and of the board,
and a folder in memory."""
SPARES = "DRIVETRAIN_SPARES"
"""Environment: the number of spares that the launcher keeps ready."""
_REPORTED_SECONDS = 1.0
"""Time within which the launcher reports a rank whose death has made a call fail."""
_AGAIN_SECONDS = 0.01
"""Time between two attempts to wake the main thread."""
_NOTE, _SUM = struct.Struct("<Qqqdd"), struct.Struct("<I")
_NOTE_BYTES = 64


Change = tuple[Literal["lost", "joined", "none"], int]
"""A change of the ranks, and the number that the rank was launched with. `none`: the ranks meet
again, and are the same."""


@dataclass(frozen=True)
class News:
    """A line of the pipe: the changes of the ranks, and whether a spare waits."""

    changes: tuple[Change, ...] = ()
    """All since the launch."""
    spare_waits: bool = False
    """True if a spare is ready to join."""

    def line(self) -> bytes:
        """Return it as the launcher writes it."""
        return json.dumps([self.changes, self.spare_waits]).encode() + b"\n"

    @classmethod
    def of(cls, line: bytes) -> News:
        """Return what `line` holds."""
        changes, spare_waits = json.loads(line)
        return cls(tuple((kind, number) for kind, number in changes), spare_waits)


@dataclass(frozen=True)
class Noted:
    """The last note of a rank: its process, its steps, and its losses since the last log."""

    process: int
    step: int = -1
    first_step: int = 0
    """The step after which `losses` begins."""
    losses: float = 0.0
    begun: float = 0.0
    """The losses of the step that has begun, as far as they are known."""

    def until(self, step: int, first_step: int) -> float | None:
        """Return the losses from one step to another; None if they are not known."""
        if self.first_step != first_step or self.step not in (step, step - 1):
            return None
        return self.losses if self.step == step else self.losses + self.begun


class Board:
    """The notes of all ranks, in memory that they share. It outlives each of them. A note that a
    rank was writing when it died is missing."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, 0)  # all of it

    @staticmethod
    def create(num_ranks: int) -> int:
        """Return the descriptor of an empty board. Raises `OSError` where memory cannot be shared
        so."""
        descriptor = os.memfd_create("drivetrain-ranks")
        os.ftruncate(descriptor, num_ranks * _NOTE_BYTES)
        return descriptor

    def close(self) -> None:
        """Give this process's view of the memory back."""
        self._memory.close()

    def write(self, number: int, note: Noted) -> None:
        """Replace the note of a rank, which alone calls this."""
        raw = _NOTE.pack(note.process, note.step, note.first_step, note.losses, note.begun)
        raw += _SUM.pack(zlib.crc32(raw))
        self._memory[number * _NOTE_BYTES : number * _NOTE_BYTES + len(raw)] = raw

    def read(self, number: int) -> Noted | None:
        """Return the note of a rank; None if it has none that is whole."""
        start = number * _NOTE_BYTES
        raw = self._memory[start : start + _NOTE.size]
        (crc,) = _SUM.unpack_from(self._memory, start + _NOTE.size)
        return Noted(*_NOTE.unpack(raw)) if crc == zlib.crc32(raw) and any(raw) else None


class _Listener:
    """The thread that reads the pipe of this process."""

    def __init__(self, pipe: int, to_launcher: int, shared: int, folder: str) -> None:
        number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.board, self.folder, self.number = Board(shared), Path(folder), number
        self.to_launcher = to_launcher
        self.news = News()
        self.handled = 0
        """Number of changes after which the ranks have met again."""
        self.members = tuple(range(size))
        """The launched numbers of the ranks that met last, by their present numbers."""
        self.places = {member: member for member in self.members}
        """The place on the machine, such as a device, of each of them."""
        self.wake: list[Callable[[], None]] = []
        self.changed = threading.Condition()
        self.board.write(number, Noted(os.getpid()))
        args = (pipe,)
        threading.Thread(target=self._read, args=args, name="drivetrain-lost", daemon=True).start()

    @property
    def is_new(self) -> bool:
        return len(self.news.changes) > self.handled

    def _read(self, pipe: int) -> None:
        rest = b""
        while True:
            ready, _, _ = select.select([pipe], [], [], _AGAIN_SECONDS if self.is_new else None)
            if ready:
                read = os.read(pipe, 1 << 16)
                if not read:
                    return  # the launcher is gone: `end_with_launcher` ends this process
                *lines, rest = (rest + read).split(b"\n")
                if lines:
                    with self.changed:
                        self.news = News.of(lines[-1])
                        self.changed.notify_all()
            # again and again: the main thread may enter its next call meanwhile
            for act in list(self.wake) if self.is_new else ():
                act()


_listeners: dict[int, _Listener] = {}
"""The listener of this process, by its number: a fork has none."""


def channel(pipe: int, to_launcher: int, shared: int, folder: str) -> str:
    """Return the value of `CHANNEL` for a rank."""
    return f"{pipe},{to_launcher},{shared},{folder}"


def is_reported() -> bool:
    """Return True if this rank's launcher reports ranks that die, and continues without them."""
    return CHANNEL in os.environ


def listen() -> None:
    """Listen to the launcher from now on, if it reports anything. Called once or more."""
    if is_reported() and os.getpid() not in _listeners:
        _listeners.clear()
        *descriptors, folder = os.environ[CHANNEL].split(",", 3)
        pipe, to_launcher, shared = map(int, descriptors)
        _listeners[os.getpid()] = _Listener(pipe, to_launcher, shared, folder)


def _listener() -> _Listener | None:
    return _listeners.get(os.getpid())


def lost() -> tuple[int, ...]:
    """Return the launched numbers of all ranks that have died, in order of their deaths."""
    here = _listener()
    return () if here is None else _of_kind("lost", here.news.changes)


def num_missing() -> int:
    """Return how many ranks have died whose place no other has taken."""
    return len(lost()) - len(joined())


def joined() -> tuple[int, ...]:
    """Return the launched numbers of all that have joined."""
    here = _listener()
    return () if here is None else _of_kind("joined", here.news.changes)


def newly_lost() -> tuple[int, ...]:
    """Return the launched numbers of the ranks that died since the ranks met."""
    here = _listener()
    return () if here is None else _of_kind("lost", here.news.changes[here.handled :])


def _of_kind(kind: str, changes: Iterable[Change]) -> tuple[int, ...]:
    return tuple(number for each, number in changes if each == kind)


def is_new() -> bool:
    """Return True if the ranks have changed since they met. Costs next to nothing."""
    here = _listener()
    return here is not None and here.is_new


def await_new() -> bool:
    """Return True once the ranks have changed since they met; False if no change is reported within
    the time that a report of a death takes."""
    here = _listener()
    if here is None:
        return False
    with here.changed:
        return here.changed.wait_for(lambda: here.is_new, _REPORTED_SECONDS)


def generation() -> int:
    """Return after how many changes the ranks have met: each meeting has its own number."""
    here = _listener()
    return 0 if here is None else here.handled


def renumber() -> tuple[Change, ...]:
    """Give this process the number and the world size that it has after the changes since the ranks
    met, and return the changes. The environment holds both numbers, as a launcher would have set
    them. LOCAL_RANK is the place on the machine, such as a device: it stays, and a rank that joins
    takes the place of a dead one."""
    here = _listener()
    if here is None:
        return ()
    news, places = here.news.changes[here.handled :], here.places
    here.handled += len(news)
    for kind, number in news:
        if kind == "lost":
            places.pop(number, None)
        elif kind == "joined":
            places[number] = min(set(range(len(places) + 1)) - set(places.values()))
    here.members = tuple(places)
    rank, size = here.members.index(here.number), str(len(places))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(places[here.number]))
    os.environ.update(WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    return news


def spare_waits() -> bool:
    """Return True if a spare is ready to join. Costs next to nothing."""
    here = _listener()
    return here is not None and here.news.spare_waits


def admit() -> None:
    """Let the spares that wait join, and return when they have joined. A rank calls it at the end
    of a step, once no rank is inside the step any more: all calls of ranks are interrupted then."""
    here = _listener()
    assert here is not None
    _report(here, f"admit {here.handled}")
    with here.changed:
        here.changed.wait_for(lambda: here.is_new)


def is_spare() -> bool:
    """Return True if this process was started as a spare, and has no rank yet."""
    return is_reported() and int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"])


def await_place() -> bool:
    """Return once this process is one of the ranks: True if it was a spare. A spare waits here, and
    has its rank from then on."""
    if not is_spare():
        return False
    listen()
    here = _listener()
    assert here is not None
    _report(here, f"ready {here.number}")
    with here.changed:
        here.changed.wait_for(lambda: ("joined", here.number) in here.news.changes)
    renumber()
    return True


def _report(here: _Listener, text: str) -> None:
    """Send a line to the launcher. If it is gone, this process ends, too."""
    with suppress(BrokenPipeError):
        os.write(here.to_launcher, text.encode() + b"\n")


def members() -> tuple[int, ...]:
    """Return the numbers that the present ranks were launched with, by their present numbers."""
    here = _listener()
    return () if here is None else here.members


def launched_number(rank: int) -> int:
    """Return the number that a rank was launched with."""
    here = _listener()
    return rank if here is None else here.members[rank]


def board() -> tuple[Board, int] | None:
    """Return the board, and the number under which this rank writes; None if nothing is
    reported."""
    here = _listener()
    return None if here is None else (here.board, here.number)


def own_number() -> int:
    """Return the number that this rank was launched with; 0 if nothing is reported."""
    here = _listener()
    return 0 if here is None else here.number


def shared_folder() -> Path:
    """Return the folder, in memory where the machine has one, that all ranks see and that the
    launcher removes."""
    here = _listener()
    assert here is not None
    return here.folder


def cut_off(rank: int) -> bool:
    """End a rank that shows no sign of life, so that its launcher reports it. Return False if
    nothing is reported, and the run must end."""
    here = _listener()
    if here is None:
        return False
    note = here.board.read(launched_number(rank))
    if note is not None:
        with suppress(ProcessLookupError):
            os.kill(note.process, signal.SIGKILL)  # wakes a stopped process, too
    return note is not None


@contextmanager
def waking(act: Callable[[], None]) -> Iterator[None]:
    """Within the block, call `act` in another thread, again and again, from the time when the ranks
    have changed until they have new numbers."""
    here = _listener()
    if here is None:
        yield
        return
    here.wake.append(act)
    try:
        yield
    finally:
        here.wake.remove(act)

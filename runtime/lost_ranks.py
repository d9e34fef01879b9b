"""Ranks that died while the others of the run continue.

A launcher that lets a run outlive its ranks opens a `Board` and gives each rank a pipe. It writes
a line to the pipes whenever a rank has died. A thread of each rank reads them, so that a survivor
knows within milliseconds, whatever its main thread waits for. On the board, which is memory that
all ranks share, each rank notes what the others need when it dies. The ranks that are left take new
numbers, from 0 on, in the old order (`renumber`).

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "CHANNEL",
    "Board",
    "Noted",
    "await_new",
    "board",
    "channel",
    "cut_off",
    "generation",
    "is_new",
    "is_reported",
    "launched_number",
    "listen",
    "lost",
    "members",
    "newly_lost",
    "own_number",
    "renumber",
    "shared_folder",
    "waking",
]

CHANNEL = "DRIVETRAIN_LOST_RANKS"
"""Environment: the descriptors of the pipe and of the board, and a folder in memory."""
_REPORTED_SECONDS = 1.0
"""Time within which the launcher reports a rank whose death has made a call fail."""
_AGAIN_SECONDS = 0.01
"""Time between two attempts to wake the main thread."""
_NOTE, _SUM = struct.Struct("<Qqqdd"), struct.Struct("<I")
_NOTE_BYTES = 64


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

    def __init__(self, descriptor: int, num_ranks: int) -> None:
        self._memory = mmap.mmap(descriptor, num_ranks * _NOTE_BYTES)

    @staticmethod
    def create(num_ranks: int) -> int:
        """Return the descriptor of an empty board. Raises `OSError` where memory cannot be shared
        so."""
        descriptor = os.memfd_create("drivetrain-ranks")
        os.ftruncate(descriptor, num_ranks * _NOTE_BYTES)
        return descriptor

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

    def __init__(self, pipe: int, shared: int, folder: str) -> None:
        number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.board, self.folder, self.number = Board(shared, size), Path(folder), number
        self.lost: tuple[int, ...] = ()
        self.handled: tuple[int, ...] = ()
        """The lost ranks without which the others have met again."""
        self.survivors = tuple(range(size))
        """The launched numbers of the ranks that met last, by their present numbers."""
        self.wake: list[Callable[[], None]] = []
        self.changed = threading.Condition()
        self.board.write(number, Noted(os.getpid()))
        args = (pipe,)
        threading.Thread(target=self._read, args=args, name="drivetrain-lost", daemon=True).start()

    @property
    def is_new(self) -> bool:
        return len(self.lost) > len(self.handled)

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
                        self.lost = tuple(json.loads(lines[-1]))
                        self.changed.notify_all()
            # again and again: the main thread may enter its next call meanwhile
            for act in list(self.wake) if self.is_new else ():
                act()


_listeners: dict[int, _Listener] = {}
"""The listener of this process, by its number: a fork has none."""


def channel(pipe: int, shared: int, folder: str) -> str:
    """Return the value of `CHANNEL` for a rank."""
    return f"{pipe},{shared},{folder}"


def is_reported() -> bool:
    """Return True if this rank's launcher reports ranks that die, and continues without them."""
    return CHANNEL in os.environ


def listen() -> None:
    """Listen to the launcher from now on, if it reports anything. Called once or more."""
    if is_reported() and os.getpid() not in _listeners:
        _listeners.clear()
        pipe, shared, folder = os.environ[CHANNEL].split(",", 2)
        _listeners[os.getpid()] = _Listener(int(pipe), int(shared), folder)


def _listener() -> _Listener | None:
    return _listeners.get(os.getpid())


def lost() -> tuple[int, ...]:
    """Return the launched numbers of all ranks that have died, in order of their deaths."""
    here = _listener()
    return () if here is None else here.lost


def newly_lost() -> tuple[int, ...]:
    """Return those of them that died since the ranks met."""
    here = _listener()
    return () if here is None else here.lost[len(here.handled) :]


def is_new() -> bool:
    """Return True if a rank has died since the ranks met. Costs next to nothing."""
    here = _listener()
    return here is not None and here.is_new


def await_new() -> bool:
    """Return True once a rank has died since the ranks met; False if none is reported within the
    time that a report takes."""
    here = _listener()
    if here is None:
        return False
    with here.changed:
        return here.changed.wait_for(lambda: here.is_new, _REPORTED_SECONDS)


def generation() -> int:
    """Return how many ranks the others have met without: each meeting has its own number."""
    here = _listener()
    return 0 if here is None else len(here.handled)


def renumber() -> None:
    """Give this process the number and the world size that it has without the lost ranks. The
    environment holds them, as a launcher would have set them."""
    here = _listener()
    if here is None:
        return
    here.handled = here.lost
    here.survivors = tuple(each for each in here.survivors if each not in here.handled)
    rank, size = here.survivors.index(here.number), len(here.survivors)
    for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
        os.environ[name] = os.environ["LOCAL_" + name] = str(value)


def members() -> tuple[int, ...]:
    """Return the numbers that the present ranks were launched with, by their present numbers."""
    here = _listener()
    return () if here is None else here.survivors


def launched_number(rank: int) -> int:
    """Return the number that a rank was launched with."""
    here = _listener()
    return rank if here is None else here.survivors[rank]


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
    """Within the block, call `act` in another thread, again and again, from the time when a rank
    has died until the ranks have new numbers."""
    here = _listener()
    if here is None:
        yield
        return
    here.wake.append(act)
    try:
        yield
    finally:
        here.wake.remove(act)

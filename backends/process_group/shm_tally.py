"""Numbers that the ranks of one machine show each other in memory that they share.

A collective over gloo wakes several threads of every rank, which can take longer than all of a
small model's step. Here a rank writes its numbers where the others see them, and looks for theirs.

Each rank has two places and uses them in turn. It writes to one again only when it has seen the
numbers that all others showed in between, and so after they have read what it showed before. What
is shown is numbered and has a checksum: no machine's order of writes can show half of it.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["MOST", "ROOM_BYTES", "SharedMemorySum", "opened"]

MOST = 16
"""Numbers that can be shown at once."""
_PLACE, _SUM = struct.Struct(f"<Q{MOST}d"), struct.Struct("<I")
_BYTES = 256
"""From one place to the next."""
_TOKEN_BYTES = 16
ROOM_BYTES = 2**13
"""Of a rank, beside its numbers."""
_SHORTEST_SECONDS, _LONGEST_SECONDS = 5e-5, 5e-3
_ALIVE_SECONDS = 0.5
"""Between looks at whether a rank that is waited for still runs."""


class SharedMemorySum:
    """One rank's view. `pids`: of all ranks. `is_left`: true where one shows nothing any more, and
    lives on. Not for several threads."""

    def __init__(
        self,
        memory: Any,
        rank: int,
        pids: Sequence[int],
        timeout_seconds: float,
        is_left: Callable[[], bool] = bool,
    ) -> None:
        self._memory, self._rank, self._pids, self._is_left = memory, rank, pids, is_left
        rooms = memoryview(memory)[_TOKEN_BYTES + 2 * len(pids) * _BYTES :]
        self.rooms = [rooms[i * ROOM_BYTES : (i + 1) * ROOM_BYTES] for i in range(len(pids))]
        """Of each rank, which alone writes to its own; all zeros at first."""
        self._timeout_seconds = timeout_seconds
        self._number = 0
        self._sums: Callable[[], list[float]] | None = None

    def show(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Show at most `MOST` numbers; the answer gives their sums over ranks, all of which show
        equally many. It raises `RuntimeError` where one is gone, late, or shows something else.
        """
        if self._sums is not None:
            self._sums()  # two places are enough for one that has not been added up
        self._number = number = self._number + 1
        raw = _PLACE.pack(number, *values, *(0.0,) * (MOST - len(values)))
        start = self._start(self._rank, number)
        self._memory[start : start + len(raw) + _SUM.size] = raw + _SUM.pack(zlib.crc32(raw))
        found: list[float] | None = None

        def sums() -> list[float]:
            nonlocal found
            if found is None:
                shown = [self._read(rank, number)[: len(values)] for rank in range(len(self._pids))]
                found = [sum(each) for each in zip(*shown, strict=True)]
                self._sums = None
            return found

        self._sums = sums
        return sums

    def _read(self, rank: int, number: int) -> tuple[float, ...]:
        """The numbers that a rank published for that tally; waits for them."""
        start = self._start(rank, number)
        began, alive = None, _ALIVE_SECONDS
        while True:
            raw = self._memory[start : start + _PLACE.size]
            (crc,) = _SUM.unpack_from(self._memory, start + _PLACE.size)
            if crc == zlib.crc32(raw):
                told, *values = _PLACE.unpack(raw)
                if told == number:
                    return tuple(values)
                if told > number:
                    raise RuntimeError(
                        f"rank {rank} has added up {told} times, and rank {self._rank} {number}"
                    )
            now = time.monotonic()
            began = now if began is None else began
            waited = now - began
            if waited > self._timeout_seconds:
                raise RuntimeError(f"rank {rank} showed nothing for {waited:.0f} s")
            if waited > alive:
                alive = waited + _ALIVE_SECONDS
                if not _runs(self._pids[rank]):
                    raise RuntimeError(f"rank {rank} (process {self._pids[rank]}) is gone")
                if self._is_left():
                    raise RuntimeError(f"rank {rank} is waited for in vain")
            time.sleep(min(max(waited / 20, _SHORTEST_SECONDS), _LONGEST_SECONDS))

    def _start(self, rank: int, number: int) -> int:
        return _TOKEN_BYTES + (2 * rank + number % 2) * _BYTES


def opened(
    rank: int,
    size: int,
    timeout_seconds: float,
    exchange: Callable[[Any], list[Any]],
    is_left: Callable[[], bool] = bool,
) -> SharedMemorySum | None:
    """A board of all ranks, or None on every rank where they cannot share memory: on several
    machines, in containers of their own, without Linux. `exchange`: gives everyone's to everyone.
    """
    length = _TOKEN_BYTES + size * (2 * _BYTES + ROOM_BYTES)
    own: dict[str, Any] = {"pid": os.getpid()}
    memory, descriptor = None, -1
    if rank == 0:
        try:
            descriptor = os.memfd_create("drivetrain")
            os.ftruncate(descriptor, length)
            memory = mmap.mmap(descriptor, length)
            token = os.urandom(_TOKEN_BYTES)
            memory[:_TOKEN_BYTES] = token
            own |= {"descriptor": descriptor, "token": token.hex()}
        except (AttributeError, OSError):
            memory = None
    told = exchange(own)
    pids = [each["pid"] for each in told]
    if rank > 0 and "token" in told[0]:
        memory = _mapped(pids[0], told[0]["descriptor"], length, bytes.fromhex(told[0]["token"]))
    # that all have mapped it is known before the descriptor is closed
    all_can = all(exchange(memory is not None and all(map(_runs, pids))))
    if descriptor >= 0:
        os.close(descriptor)
    return SharedMemorySum(memory, rank, pids, timeout_seconds, is_left) if all_can else None


def _mapped(pid: int, descriptor: int, length: int, token: bytes) -> mmap.mmap | None:
    """Another process's memory, if it is the one that is meant: numbers of processes and of their
    descriptors mean nothing on another machine."""
    try:
        here = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        memory = mmap.mmap(here, length)
    except (OSError, ValueError):
        return None
    finally:
        os.close(here)
    return memory if memory[:_TOKEN_BYTES] == token else None


def _runs(pid: int) -> bool:
    """True if a process of that number runs on this machine."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return told.rpartition(")")[2].split()[0] not in "ZX"

"""Sums over the ranks of one machine, by numbers that they publish in shared memory.

A collective over gloo wakes several threads of every rank, which can take longer than all of a
small model's step. Here a rank writes its numbers where the other ranks see them, and looks for
theirs.

Each rank has two places, and writes to them in turn. It writes to a place again only when it has
seen the numbers that all others published in between, and so after they have read the earlier
numbers of the place. Published numbers include the tally's number and a checksum, so that no rank
can read them half written, whatever the machine's order of writes.
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

from ... import lost_ranks

__all__ = ["MOST", "SLOT_BYTES", "SharedMemorySum", "opened"]

MOST = 16
"""Most numbers in one tally."""
_PLACE, _SUM = struct.Struct(f"<Q{MOST}d"), struct.Struct("<I")
_BYTES = 256
"""Distance from one place to the next."""
_TOKEN_BYTES = 16
SLOT_BYTES = 2**13
"""Memory of each rank besides its numbers."""
_SHORTEST_SECONDS, _LONGEST_SECONDS = 5e-5, 5e-3
_ALIVE_SECONDS = 0.5
"""Time between checks whether a rank still runs."""


class SharedMemorySum:
    """One rank's view of the shared memory. `pids`: process ids of all ranks. `rank_aborted`:
    returns True once a rank is alive but publishes nothing any more. Not thread-safe.
    """

    def __init__(
        self,
        memory: Any,
        rank: int,
        pids: Sequence[int],
        timeout_seconds: float,
        rank_aborted: Callable[[], bool] = bool,
    ) -> None:
        self._memory, self._rank, self._pids, self._rank_aborted = memory, rank, pids, rank_aborted
        slots = memoryview(memory)[_TOKEN_BYTES + 2 * len(pids) * _BYTES :]
        self.slots = [slots[i * SLOT_BYTES : (i + 1) * SLOT_BYTES] for i in range(len(pids))]
        """Memory of each rank, which alone writes to it; all zeros at first."""
        self._timeout_seconds = timeout_seconds
        self._number = 0
        self._sums: Callable[[], list[float]] | None = None

    def publish(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Publish at most `MOST` numbers; every rank publishes equally many. The returned function
        gives their sums over ranks. It raises `RuntimeError` if a rank is gone, late, or at another
        tally.
        """
        if self._sums is not None:
            self._sums()  # two places allow one tally that has not been added up
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
        """Wait for the numbers that a rank publishes for that tally, and return them."""
        start = self._start(rank, number)
        began, alive = None, _ALIVE_SECONDS
        while True:
            raw = self._memory[start : start + _PLACE.size]
            (crc,) = _SUM.unpack_from(self._memory, start + _PLACE.size)
            if crc == zlib.crc32(raw):
                found, *values = _PLACE.unpack(raw)
                if found == number:
                    return tuple(values)
                if found > number:
                    raise RuntimeError(
                        f"rank {rank} has added up {found} times, and rank {self._rank} {number}"
                    )
            if lost_ranks.is_new():
                raise RuntimeError(f"a rank has died; rank {rank} is not waited for")
            now = time.monotonic()
            began = now if began is None else began
            waited = now - began
            if waited > self._timeout_seconds:
                raise RuntimeError(f"rank {rank} showed nothing for {waited:.0f} s")
            if waited > alive:
                alive = waited + _ALIVE_SECONDS
                if not _runs(self._pids[rank]):
                    raise RuntimeError(f"rank {rank} (process {self._pids[rank]}) is gone")
                if self._rank_aborted():
                    raise RuntimeError(f"a rank has aborted; rank {rank} is not waited for")
            time.sleep(min(max(waited / 20, _SHORTEST_SECONDS), _LONGEST_SECONDS))

    def _start(self, rank: int, number: int) -> int:
        return _TOKEN_BYTES + (2 * rank + number % 2) * _BYTES


def opened(
    rank: int,
    size: int,
    timeout_seconds: float,
    exchange: Callable[[Any], list[Any]],
    rank_aborted: Callable[[], bool] = bool,
) -> SharedMemorySum | None:
    """Open the shared memory of all ranks. Returns None on every rank if they cannot share memory:
    on several machines, in separate containers, without Linux. `exchange`: returns the values of
    all ranks.
    """
    length = _TOKEN_BYTES + size * (2 * _BYTES + SLOT_BYTES)
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
    everyones = exchange(own)
    pids = [each["pid"] for each in everyones]
    if rank > 0 and "token" in (first := everyones[0]):
        memory = _mapped(pids[0], first["descriptor"], length, bytes.fromhex(first["token"]))
    # close the descriptor only when all ranks have mapped the memory
    all_can = all(exchange(memory is not None and all(map(_runs, pids))))
    if descriptor >= 0:
        os.close(descriptor)
    return SharedMemorySum(memory, rank, pids, timeout_seconds, rank_aborted) if all_can else None


def _mapped(pid: int, descriptor: int, length: int, token: bytes) -> mmap.mmap | None:
    """Map another process's memory, after a check of its token: process ids and descriptors mean
    nothing on another machine.
    """
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
    """Return True if a process of that id runs on this machine."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"

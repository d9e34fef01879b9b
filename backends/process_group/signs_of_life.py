"""What ranks publish of themselves and say of each other, for `stall_watch`."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Heartbeat:
    """What a rank publishes of itself."""

    beat: int
    idle_seconds: float
    steps: int
    call: str
    """The call that it waits in, or nothing."""
    place: str
    """The innermost frames of its main thread."""
    own: bool = False
    """It is in code of the user's: the innermost frame is of nothing that talks to other ranks."""

    @property
    def late(self) -> bool:
        """It does not wait for anybody."""
        return self.own or not self.call


@dataclass(frozen=True)
class Late:
    """A rank that lives, and keeps others waiting."""

    rank: int
    seconds: float
    """The time that others had waited for it when it was found."""
    steps: int
    place: str
    by: int
    """The rank that waits, and the call that it waits in."""
    call: str

    def __str__(self) -> str:
        return f"it is at {self.place}, and rank {self.by} waits in {self.call!r}"

    @property
    def key(self) -> tuple[int, int]:
        """Identifies an announcement: a late rank is announced once a step."""
        return self.rank, self.steps


def processor_seconds() -> float:
    """Processor seconds used by this process and its living children; of this process alone where
    the system does not count children."""
    total = time.process_time()
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = os.sysconf("SC_CLK_TCK")
        for listed in Path("/proc/self/task").glob("*/children"):
            for child in listed.read_text().split():
                # after the name, which may hold spaces: user and system time are 12th and 13th
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / ticks
    return total

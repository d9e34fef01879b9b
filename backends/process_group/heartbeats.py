"""Messages that ranks publish about themselves and about each other, for `stall_watch`."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import sysconfig
import time
import traceback
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType

_LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
"""Folders of Python and of what is installed."""
_COMMUNICATES = re.compile(
    r"[/\\](torch[/\\](distributed|autograd|_ops\.py)|deepspeed[/\\])|"
    + re.escape(str(Path(__file__).parent))
)
"""Matches files of code that waits for other ranks, or computes."""


@dataclass(frozen=True)
class Heartbeat:
    """State of a rank, which it publishes itself."""

    beat: int
    idle_seconds: float
    steps: int
    call: str
    """The call that the rank waits in, or an empty string."""
    place: str
    """The innermost frames of its main thread."""
    own: bool = False
    """True in the user's code: the innermost frame is not of code that communicates with ranks."""

    @property
    def late(self) -> bool:
        """True if the rank waits for nobody, though others wait for it."""
        return self.beat != JOINED and (self.own or not self.call)

    @property
    def is_renewed(self) -> bool:
        """True if a living rank replaces this heartbeat by the next one."""
        return self.beat not in (ABSENT, JOINED)

    def __str__(self) -> str:
        if self.beat == ABSENT:
            return "has not come"
        call = f", in {self.call}" if self.call else ""
        return f"stands still after {self.steps} steps{call}, last seen at {self.place}"


ABSENT, JOINED = -2, -3
"""Values of `beat` for a rank that has published nothing yet, and for one that has joined the
process group and is not watched any more.
"""
ABSENT_HEARTBEAT = Heartbeat(ABSENT, 0.0, 0, "", "", own=True)


@dataclass(frozen=True)
class Late:
    """A living rank that keeps others waiting."""

    rank: int
    seconds: float
    """The time that others had waited for it when it was found."""
    steps: int
    place: str
    by: int
    """The rank that waits, and the call that it waits in."""
    call: str

    def __str__(self) -> str:
        where = f"it is at {self.place}" if self.place else "it has not come"
        return f"{where}, and rank {self.by} waits in {self.call!r}"

    @property
    def key(self) -> tuple[int, int]:
        """Identifies an announcement: a late rank is announced once a step."""
        return self.rank, self.steps


def processor_seconds() -> float:
    """Return the processor seconds used by this process and its living children, or by this process
    alone if the system does not count children.
    """
    total = time.process_time()
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = os.sysconf("SC_CLK_TCK")
        for listed in Path("/proc/self/task").glob("*/children"):
            for child in listed.read_text().split():
                # after the name, which may hold spaces: user and system time are 12th and 13th
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def place_of(thread: int) -> tuple[str, bool]:
    """Return the place of a running thread, and True if it is in the user's code: the innermost
    frame is not of code that communicates with ranks.

    The place: the last three calls, and the last one of the user's code, which may lie deeper: it
    is what the user can change. No frame is kept. It would keep the tensors of functions that have
    returned since.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "", False
    frames = [frame for frame, _ in traceback.walk_stack(frame)]
    shown = frames[:3]
    called_by_us = max((n for n, frame in enumerate(frames) if _is_ours(frame)), default=0)
    users = (each for each in frames[:called_by_us] if not _is_a_library_s(each))
    shown += [each for each in islice(users, 1) if each not in shown]
    place = ", called from ".join(
        f"{Path(each.f_code.co_filename).name}:{each.f_lineno} in {each.f_code.co_name}"
        for each in shown
    )
    return place, not _COMMUNICATES.search(frame.f_code.co_filename)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("drivetrain.")


def _is_a_library_s(frame: FrameType) -> bool:
    return _is_ours(frame) or frame.f_code.co_filename.startswith(_LIBRARIES)

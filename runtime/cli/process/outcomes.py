"""How ranks ended: each writes it to a file, for the launcher that started them. It needs
the standard library alone."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

__all__ = [
    "FINISHED",
    "OUTCOMES",
    "PREEMPTED",
    "RESTARTS",
    "have_begun",
    "note_begun",
    "note_outcome",
    "rank",
    "world_size",
]

OUTCOMES = "DRIVETRAIN_OUTCOMES"
"""Environment: the folder where ranks write how they ended."""
PREEMPTED = "preempted"
"""Message of a rank that saved and stopped; the launcher does not print it."""
FINISHED = "finished"
"""Message of a rank that finished. A rank without a message was ended by the user's code."""
RESTARTS = "DRIVETRAIN_RESTARTS"
"""Environment: set where the launcher may restart ranks: the run may outlive them."""
_BEGUN = ".begun"


def rank() -> int:
    """Return the rank of this process by its environment; 0 where that has no valid number."""
    return _number("RANK", 0)


def world_size() -> int:
    """Return the number of ranks by the environment; 1 where that has no valid number."""
    return _number("WORLD_SIZE", 1)


def _number(name: str, default: int) -> int:
    """Read a number from the environment. It never raises, since it is used to report errors."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


def note_outcome(code: int, message: str) -> bool:
    """Write for the launcher how this rank ended, so that one message is printed however many ranks
    fail. Return False if no launcher of ours waits for it, or it cannot be written."""
    folder = os.environ.get(OUTCOMES)
    if folder is None:
        return False
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    note = {
        "rank": rank(),
        "code": code,
        "message": message,
        "attempt": attempt,
        "time": time.time(),
    }
    try:
        Path(folder, f"{rank()}.json").write_text(json.dumps(note))
    except OSError:
        return False
    return True


def note_begun() -> None:
    """Record for the launcher that a run handles the signals of this rank from now on."""
    if (folder := os.environ.get(OUTCOMES)) is not None:
        with suppress(OSError):
            Path(folder, f"{rank()}{_BEGUN}").touch()


def have_begun(folder: str) -> bool:
    """True if any rank has called `note_begun`."""
    return any(Path(folder).glob(f"*{_BEGUN}"))

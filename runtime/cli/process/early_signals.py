"""Handles signals to `drivetrain train` from its first line on, before torch is imported. It
needs the standard library alone."""

from __future__ import annotations

import atexit
import os
import signal
import time
from types import FrameType

from ...data.stop_signals import STOP_SIGNALS, unblock
from ...kernel.errors import EXIT_PREEMPTED
from .outcomes import RESTARTS, note_begun, note_outcome

__all__ = ["hand_over", "handle_early", "is_first", "nothing_done"]

_TOGETHER_SECONDS = 1.0
"""Signals that follow the first within this time count as the same one."""


class _Seen:
    """Signals that this process has received, and the time of the first; shared by all handlers."""

    handed_over = False
    first_at: float | None = None


def handle_early() -> None:
    """Handle the signals of this process until a run does. For the main thread."""
    for number in STOP_SIGNALS:
        signal.signal(number, _handle)
    unblock()  # the launcher starts its ranks with them blocked
    atexit.register(_ignore_all)  # the first registered is the last called


def hand_over() -> None:
    """Leave signals to a run from now on. Signals that arrive after that run are ignored."""
    _Seen.handed_over = True
    note_begun()


def is_first(number: int) -> bool:
    """Return True for the first signal, and False for those that arrive with it. A later signal
    ends the process."""
    now, first_at = time.monotonic(), _Seen.first_at
    if first_at is None:
        _Seen.first_at = now
    elif now - first_at >= _TOGETHER_SECONDS:
        os._exit(128 + number)
    return first_at is None


def nothing_done(number: int) -> str:
    """Return the message of a command that a signal ended before training began."""
    return (
        f"{signal.Signals(number).name} came before training began: nothing was done, so nothing "
        "is saved. Run the same command again"
    )


def _handle(number: int, frame: FrameType | None) -> None:
    if not is_first(number) or _Seen.handed_over:
        return  # the run is over, and the process about to end
    # not raised: a library may be half imported, and its importer may catch any exception
    message = nothing_done(number)
    if not note_outcome(EXIT_PREEMPTED, message) or RESTARTS in os.environ:
        os.write(2, f"error: {message}\n".encode())
    os._exit(EXIT_PREEMPTED)


def _ignore_all() -> None:
    """Ignore signals while Python ends, since its handlers no longer run then."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)

"""The signals that ask a run to save and stop, in processes that will handle them later or leave
them to their parent. This module imports the standard library alone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = [
    "STOP_SIGNALS",
    "blocked",
    "blocked_in_children",
    "leave_to_parent",
    "note_until_handled",
    "noted",
    "unblock",
]

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)
)
noted: list[int] = []
"""Signals that this process received before its run could handle them."""


@contextmanager
def blocked() -> Iterator[None]:
    """Block the signals in this thread. A process that is started meanwhile starts with the signals
    blocked, and they stay pending until it calls `unblock`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def blocked_in_children() -> Iterator[None]:
    """Block the signals for child processes alone. An idle thread receives the signals of this
    process meanwhile; Python runs their handlers in the main thread as usual."""
    over = threading.Event()
    receiver = threading.Thread(target=over.wait, name="drivetrain-receiver", daemon=True)
    receiver.start()
    try:
        with blocked():
            yield
    finally:
        over.set()
        receiver.join()


def unblock() -> None:
    """Receive the signals that were blocked when this process was started."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def note_until_handled() -> None:
    """Record the signals in `noted`. Call it in the main thread of a process that was started with
    signals blocked and whose run will begin in a moment."""
    for number in STOP_SIGNALS:
        signal.signal(number, _note)
    unblock()


def leave_to_parent() -> None:
    """Ignore the signals in a data worker: a scheduler or a launcher sends them to each process of
    a job, and the training process needs its workers until it has saved.

    The handler does nothing; SIG_IGN would be inherited by processes that the worker starts. The
    parent ends such a worker by SIGKILL (`killed_workers.context_of`).
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _ignore)
        signal.siginterrupt(number, False)
    unblock()


def _note(number: int, frame: FrameType | None) -> None:
    noted.append(number)


def _ignore(number: int, frame: FrameType | None) -> None:
    pass

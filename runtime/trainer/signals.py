"""Signals: the first asks the run to save and stop, the second ends the process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from ..kernel.events import Request, Requests

__all__ = ["preempt_on_signals"]

_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
_END = b"\0"
_TOGETHER_SECONDS = 1.0
"""Signals that follow the first so soon are the same one: a scheduler signals every process of a
job, and the launcher among them its ranks once more."""


@contextmanager
def preempt_on_signals(requests: Requests) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGUSR1 ask to preempt; another one, a moment later or more, ends the
    process at once, whatever it is doing or waiting for.

    Signals are left alone outside the main thread, where Python cannot handle them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        requests.ask(Request.PREEMPT)

    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    with _second_signal_kills(numbers):
        before = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def _second_signal_kills(numbers: Sequence[int]) -> Iterator[None]:
    """While it is open, the second of these signals ends the process. A thread sees to it: the main
    one does not get to its handlers while it waits for other ranks.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def watch() -> None:
        first: float | None = None
        while (number := os.read(reading, 1)) != _END:
            if number[0] not in numbers:
                continue
            now = time.monotonic()
            first = now if first is None else first
            if now - first >= _TOGETHER_SECONDS:
                name = signal.Signals(number[0]).name
                os.write(2, f"{name} came once more: stopped at once, nothing saved\n".encode())
                os._exit(128 + number[0])

    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, name="drivetrain-signals", daemon=True)
    thread.start()
    _writing.append(writing)
    try:
        yield
    finally:
        _writing.remove(writing)
        signal.set_wakeup_fd(before)
        os.write(writing, _END)
        thread.join()
        os.close(reading)
        os.close(writing)


_writing: list[int] = []


def _reset_after_fork() -> None:
    """In a fork: its signals are not its parent's."""
    if _writing:
        with contextlib.suppress(ValueError):  # of a fork by another thread than the main one
            signal.set_wakeup_fd(-1)
        _writing.clear()


os.register_at_fork(after_in_child=_reset_after_fork)

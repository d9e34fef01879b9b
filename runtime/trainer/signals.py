"""Signals: the first asks the run to save and stop, the second ends the process, or in an
interactive session the run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..data.stop_signals import STOP_SIGNALS, noted
from ..kernel.errors import EXIT_PREEMPTED
from ..kernel.events import Request, Requests
from ..launched import is_first_rank, world_size

__all__ = ["StoppedBeforeStart", "preempt_on_signals", "stopping_before_start"]

_END = b"\0"
_TOGETHER_SECONDS = 1.0
"""Signals within this time after the first count as the same signal: a scheduler signals every
process of a job, and the launcher, which is one of them, passes the signal to its ranks once
more."""


class StoppedBeforeStart(SystemExit):
    """A signal arrived before the ranks of a run had connected: nothing was done."""

    def __init__(self, number: int) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.number = number


_before_start: list[bool] = []
"""Not empty while a signal raises `StoppedBeforeStart`."""


@contextmanager
def stopping_before_start(requests: Requests) -> Iterator[None]:
    """End this rank at once on a signal while several ranks connect in the block. The other ranks
    may have ended already, during their imports, and this rank would wait for them in vain."""
    if world_size() == 1:
        yield
        return
    _before_start.append(True)
    try:
        if requests.is_asked(Request.PREEMPT):
            raise StoppedBeforeStart(signal.SIGTERM)
        yield
    finally:
        _before_start.clear()


@contextmanager
def preempt_on_signals(requests: Requests, saves: bool = True) -> Iterator[None]:
    """Request preemption on SIGTERM, SIGINT and SIGUSR1; rank 0 reports it at once on stderr. A
    second signal, at least a moment later, ends the process at once, whatever it is doing or
    waiting for. Signals that were `noted` before count as the first. In an interactive session,
    such as a notebook's kernel, a second SIGINT raises `KeyboardInterrupt` instead, and the session
    stays alive.

    Signals are left alone outside the main thread, where Python cannot handle them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    again = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        requests.ask(Request.PREEMPT)
        if _before_start:
            raise StoppedBeforeStart(number)
        if again.is_set():
            again.clear()
            raise KeyboardInterrupt("interrupted once more: stopped at once, without saving")

    with _second_signal_ends(saves, again if _is_interactive() else None):
        before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
        if noted:
            requests.ask(Request.PREEMPT)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _is_interactive() -> bool:
    """True in an interactive session: a prompt of Python or IPython, or the kernel of a notebook.
    False in a rank that was forked from one."""
    typed = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    return typed and world_size() == 1


@contextmanager
def _second_signal_ends(saves: bool, again: threading.Event | None) -> Iterator[None]:
    """Answer the first signal in the block, and end the process on the second. A thread does this:
    the main thread does not run its handlers while it waits for other ranks.

    `again`: set by a second SIGINT, which then interrupts the main thread, and does not end the
    process.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    main = threading.get_ident()

    def watch() -> None:
        last: float | None = None
        while (number := os.read(reading, 1)) != _END:
            if number[0] not in STOP_SIGNALS:
                continue
            now = time.monotonic()
            if last is None:
                last = now
                if not _before_start:
                    _answer(number[0], saves)
            if now - last < _TOGETHER_SECONDS:
                continue
            if again is not None and number[0] == signal.SIGINT:
                last = now  # the signal sent here is not a third one
                again.set()
                signal.pthread_kill(main, signal.SIGINT)  # also interrupts a sleep
            else:
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


def _answer(number: int, saves: bool) -> None:
    """Print what the first signal will do. Of several ranks only one prints: a launcher passes a
    signal on to each of them."""
    if not is_first_rank():
        return
    again = "press" if number == signal.SIGINT else "signal"
    does, without = ("saving", "without saving") if saves else ("stopping", "at once")
    with contextlib.suppress(OSError, ValueError):  # the disk may be full, or stderr closed
        name = signal.Signals(number).name
        print(
            f"{name}: {does} after this step; {again} again to stop {without}",
            file=sys.stderr,
            flush=True,
        )


_writing: list[int] = []


def _reset_after_fork() -> None:
    """Reset the signals of a fork, which are not those of its parent."""
    if _writing:
        with contextlib.suppress(ValueError):  # of a fork by a thread other than the main one
            signal.set_wakeup_fd(-1)
        _writing.clear()


os.register_at_fork(after_in_child=_reset_after_fork)

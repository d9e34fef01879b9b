"""What observers and signals ask for, collected on one rank until all ranks agree on it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from .events import Request

__all__ = ["Requests"]

_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
_NOTHING = (0.0,) * len(Request)


class Requests:
    """Requests of this rank that have not been sent yet.

    `send` hands them over as one number each, to be added up over ranks with the step's own tally,
    so that agreeing costs no communication of its own.
    """

    def __init__(self) -> None:
        self._asked: set[Request] = set()

    def ask(self, request: Request | None) -> None:
        """Remember a request; None is none."""
        if request is not None:
            self._asked.add(request)

    def send(self) -> Sequence[float]:
        """One number for each kind of request; they count as handed over."""
        if not self._asked:
            return _NOTHING
        numbers = [float(request in self._asked) for request in Request]
        self._asked.clear()
        return numbers

    @contextmanager
    def from_signals(self) -> Iterator[None]:
        """SIGTERM, SIGINT and SIGUSR1 ask to preempt; a second one does what it always did.

        Signals are left alone outside the main thread, where Python cannot handle them.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.getsignal(number)
            for name in _SIGNALS
            if (number := getattr(signal, name, None)) is not None
        }

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

        def handle(number: int, frame: FrameType | None) -> None:
            if Request.PREEMPT in self._ever:
                restore()
                os.kill(os.getpid(), number)
            self._ever.add(Request.PREEMPT)
            self.ask(Request.PREEMPT)

        self._ever: set[Request] = set()
        for number in before:
            signal.signal(number, handle)
        try:
            yield
        finally:
            restore()

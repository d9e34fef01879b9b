"""Handles signals while `fit` does not: before it, and after."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..kernel.errors import EXIT_PREEMPTED
from ..kernel.events import Request

__all__ = ["StoppedEarly", "Stopping"]

_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")


class StoppedEarly(KeyboardInterrupt):
    """A signal came before training began. No `Exception`, so that `except Exception` does not
    catch it."""

    exit_code = EXIT_PREEMPTED


class Stopping:
    """An observer that handles a command's signals until it ends.

    Before training begins there is nothing to save, and a signal ends the command. After training
    signals are ignored: the rest takes a moment.
    """

    def __init__(self) -> None:
        self._begun = self._asked = False

    def begin(self) -> None:
        """Call it right before `fit`, which handles signals as soon as it can."""
        self._begun = True

    def __call__(self, event: Any) -> Request | None:
        return Request.PREEMPT if self._asked else None

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """While it is open. To be opened in the main thread."""
        numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
        before = {number: signal.signal(number, self._hear) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self._begun:
            name = signal.Signals(number).name
            raise StoppedEarly(
                f"{name} came before training began: nothing was done, and nothing is to be saved. "
                "The same command begins again"
            )
        self._asked = True

"""Handles signals before and after `fit`, which handles them while it runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ...data.stop_signals import STOP_SIGNALS, noted
from ...kernel.errors import EXIT_PREEMPTED
from ...kernel.events import Request
from .early_signals import hand_over, is_first, nothing_done

__all__ = ["StoppedEarly", "Stopping"]


class StoppedEarly(KeyboardInterrupt):
    """A signal came before training began. `except Exception` does not catch it."""

    exit_code = EXIT_PREEMPTED


class Stopping:
    """An observer that handles a command's signals until it ends.

    Before training begins there is nothing to save, and a signal ends the command. After training
    signals are ignored, since the command ends in a moment.
    """

    def __init__(self) -> None:
        self._begun = self._stop_requested = False

    def begin(self) -> None:
        """Call it right before `fit`, which handles signals as soon as it can."""
        self._begun = True

    def __call__(self, event: Any) -> Request | None:
        return Request.PREEMPT if self._stop_requested else None

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle signals until the block ends. For the main thread."""
        before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        hand_over()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if is_first(number) and not self._begun:
            raise StoppedEarly(nothing_done(number))
        self._stop_requested = True
        noted.append(number)  # for `fit`, where it has yet to handle signals

"""Writes and removes checkpoints in the background: in one thread of the process, in order."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

__all__ = ["background_finished", "remove_in_background", "removed", "write_in_background"]


class _Background:
    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "checkpoint", _lower_priority)
        self.removal: Future[None] | None = None
        self.newest: list[Future[Any]] = []

    def submit(self, act: Callable[[], Any]) -> Future[Any]:
        self.newest = [self.thread.submit(act)]
        return self.newest[0]


def _lower_priority() -> None:
    """Lower this thread's priority, on systems where threads have their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


_BACKGROUND = _Background()
if hasattr(os, "register_at_fork"):  # a fork has no copy of the thread
    os.register_at_fork(after_in_child=_BACKGROUND.__init__)  # type: ignore[misc]


def write_in_background(act: Callable[[], Any]) -> Future[Any]:
    """Run `act` in the background; the caller asks the returned future for its result or error."""
    return _BACKGROUND.submit(act)


def remove_in_background(act: Callable[[], None]) -> None:
    """Run `act` in the background; an error is raised by the next `removed`."""
    _BACKGROUND.removal = _BACKGROUND.submit(act)


def removed() -> None:
    """Wait until nothing is being removed: a sweep must not run at the same time."""
    if _BACKGROUND.removal is not None:
        try:
            _BACKGROUND.removal.result()
        finally:
            _BACKGROUND.removal = None


@contextmanager
def background_finished() -> Iterator[None]:
    """Wait, when the block ends or raises, for all background work that it started."""
    try:
        yield
    finally:
        wait(_BACKGROUND.newest)

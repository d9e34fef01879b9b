"""Writing and removing checkpoints while training goes on: one thread of a process, in order."""

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
        self.thread = ThreadPoolExecutor(1, "checkpoint", _give_way)
        self.removal: Future[None] | None = None
        self.newest: list[Future[Any]] = []

    def submit(self, act: Callable[[], Any]) -> Future[Any]:
        self.newest = [self.thread.submit(act)]
        return self.newest[0]


def _give_way() -> None:
    """Lower this thread's priority, where the system lets threads differ in that."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


_BACKGROUND = _Background()
if hasattr(os, "register_at_fork"):  # a thread is not forked, and its work would not be done
    os.register_at_fork(after_in_child=_BACKGROUND.__init__)  # type: ignore[misc]


def write_in_background(act: Callable[[], Any]) -> Future[Any]:
    """Run `act` in the background; the caller asks the returned future for its result or error."""
    return _BACKGROUND.submit(act)


def remove_in_background(act: Callable[[], None]) -> None:
    """Run `act` in the background; an error is raised by the next `removed`."""
    _BACKGROUND.removal = _BACKGROUND.submit(act)


def removed() -> None:
    """Wait until nothing is being removed: a sweep must not meet it."""
    if _BACKGROUND.removal is not None:
        try:
            _BACKGROUND.removal.result()
        finally:
            _BACKGROUND.removal = None


@contextmanager
def background_finished() -> Iterator[None]:
    """Around a run: when the block ends, by an error too, wait for all that it began in the
    background."""
    try:
        yield
    finally:
        wait(_BACKGROUND.newest)

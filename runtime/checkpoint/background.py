"""Writing and removing checkpoints while training goes on: one thread of a process, in order."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

__all__ = ["nothing_behind", "remove_behind", "removed", "write_behind"]


class _Behind:
    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "checkpoint", _give_way)
        self.removal: Future[None] | None = None
        self.newest: list[Future[Any]] = []

    def submit(self, act: Callable[[], Any]) -> Future[Any]:
        self.newest = [self.thread.submit(act)]
        return self.newest[0]


def _give_way() -> None:
    """To training, where the system lets threads differ in that."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


_BEHIND = _Behind()
if hasattr(os, "register_at_fork"):  # a thread is not forked, and its work would not be done
    os.register_at_fork(after_in_child=_BEHIND.__init__)  # type: ignore[misc]


def write_behind(act: Callable[[], Any]) -> Future[Any]:
    """Its result, or what it raised, is the caller's to ask for."""
    return _BEHIND.submit(act)


def remove_behind(act: Callable[[], None]) -> None:
    """Run `act` in the background; an error is raised by the next `removed`."""
    _BEHIND.removal = _BEHIND.submit(act)


def removed() -> None:
    """Wait until nothing is being removed: a sweep must not meet it."""
    if _BEHIND.removal is not None:
        try:
            _BEHIND.removal.result()
        finally:
            _BEHIND.removal = None


@contextmanager
def nothing_behind() -> Iterator[None]:
    """Around a run: when it is left, by an error too, nothing that it began goes on any more."""
    try:
        yield
    finally:
        wait(_BEHIND.newest)

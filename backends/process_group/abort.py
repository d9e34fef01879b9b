"""Ranks that abort: they report the reason to the other ranks, through a store, before they end."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ...data.parent import LAUNCHER

__all__ = ["Abort", "acknowledged_key", "end_process"]

TOGETHER_SECONDS = 10.0
"""Longest time for all ranks to abort together."""


def acknowledged_key(rank: int) -> str:
    """Return the key by which a rank acknowledges that it has received the verdict."""
    return f"acknowledged/{rank}"


def end_process(rank: int, text: str, stacks: bool, reported_elsewhere: bool) -> None:
    """End this process, whose main thread waits in a call that does not return. `stacks`: print the
    stacks of its threads. `reported_elsewhere`: another rank ends by an error of its own.
    drivetrain's launcher prints that error for all ranks, so this rank prints nothing before it.
    """
    if not (reported_elsewhere and LAUNCHER in os.environ):
        message = f"error: rank {rank} on {socket.gethostname()}: {text}."
        print(message, file=sys.stderr, flush=True)
    if stacks:
        print("What each thread is doing:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
    os._exit(1)


class Abort:
    """Aborts this rank, or all ranks together. `store`: a store for the main thread, which calls
    this.
    """

    def __init__(self, store: Any, rank: int, others: Sequence[int]) -> None:
        self._store, self._rank, self._others = store, rank, others
        self._times = 0

    def all_abort(self, seconds: float) -> bool:
        """Return True if all other ranks call this, too, within that time."""
        key, self._times = f"aborted/{self._times}", self._times + 1
        limit = timedelta(seconds=min(seconds, TOGETHER_SECONDS))
        with contextlib.suppress(RuntimeError):  # out of time
            if self._store.add(key, 1) == len(self._others) + 1:
                self._store.set(f"{key}/all", "1")
            self._store.wait([f"{key}/all"], limit)
            return True
        return False

    def report(self, why: str, seconds: float) -> None:
        """Report the reason. Wait until the other ranks have received it, since the store may end
        with this rank, or until time is up.
        """
        args = why, timedelta(seconds=seconds)
        # in a thread, since the store may not answer
        publishing = threading.Thread(target=self._publish, args=args, daemon=True)
        publishing.start()
        publishing.join(1.5 * seconds)

    def _publish(self, why: str, limit: timedelta) -> None:
        verdict = json.dumps({"stalled": [self._rank], "text": why, "left": True})
        with contextlib.suppress(RuntimeError):  # out of time, or the store is gone
            self._store.compare_set("verdict", "", verdict)  # the first one is the cause
            self._store.set(acknowledged_key(self._rank), "1")
            self._store.wait([acknowledged_key(other) for other in self._others], limit)

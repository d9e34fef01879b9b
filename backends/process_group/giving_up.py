"""A rank that cannot go on says so to the others before it ends, through a store."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

__all__ = ["GivingUp", "heard"]

TOGETHER_SECONDS = 10.0
"""At most, for all ranks to give up."""


def heard(rank: int) -> str:
    """The key by which a rank says that it knows the verdict."""
    return f"heard/{rank}"


class GivingUp:
    """`store`: for the main thread, which calls this."""

    def __init__(self, store: Any, rank: int, others: Sequence[int]) -> None:
        self._store, self._rank, self._others = store, rank, others
        self._times = 0

    def all_do(self, seconds: float) -> bool:
        """True if all other ranks call it, too, in that time."""
        key, self._times = f"gave up/{self._times}", self._times + 1
        limit = timedelta(seconds=min(seconds, TOGETHER_SECONDS))
        with contextlib.suppress(RuntimeError):  # out of time
            if self._store.add(key, 1) == len(self._others) + 1:
                self._store.set(f"{key}/all", "1")
            self._store.wait([f"{key}/all"], limit)
            return True
        return False

    def tell(self, why: str, seconds: float) -> None:
        """Until the others have heard it, since the store may go with this rank, or time is up."""
        args = why, timedelta(seconds=seconds)
        # a thread, since the store may be what stands still
        telling = threading.Thread(target=self._tell, args=args, daemon=True)
        telling.start()
        telling.join(1.5 * seconds)

    def _tell(self, why: str, limit: timedelta) -> None:
        verdict = json.dumps({"stalled": [self._rank], "text": why, "left": True})
        with contextlib.suppress(RuntimeError):  # out of time, or the store is gone
            self._store.compare_set("verdict", "", verdict)  # the first one is the cause
            self._store.set(heard(self._rank), "1")
            self._store.wait([heard(other) for other in self._others], limit)

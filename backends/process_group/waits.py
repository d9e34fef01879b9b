"""The time that a rank has waited for other ranks, as far as its host knows."""

from __future__ import annotations

import time

__all__ = ["Waits"]


class Waits:
    """The seconds that the main thread has waited."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def begin_work(self) -> tuple[float, float, float]:
        """Return the state for `end_work`, where this thread begins to compute, and also waits."""
        return time.monotonic(), time.thread_time(), self.seconds

    def end_work(self, began: float, used: float, waited: float) -> None:
        """Count the time since then in which this thread did not use the processor."""
        idle = time.monotonic() - began - (time.thread_time() - used)
        self.seconds = max(self.seconds, waited + idle)  # waits inside are counted already

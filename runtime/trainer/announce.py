"""Events of a run, given to who observes it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ..kernel.events import Event, Observer, Requests

__all__ = ["Announcer"]


class Announcer:
    """Call it with an event: all observers get it, and `requests` get what they ask for. Any
    thread may."""

    def __init__(self, observers: Sequence[Observer], requests: Requests) -> None:
        self.observers, self.requests = observers, requests
        self._one_at_a_time = threading.RLock()

    def __call__(self, event: Event) -> None:
        with self._one_at_a_time:
            for observer in self.observers:
                self.requests.ask(observer(event))

"""The seconds that calls of a method take in a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["TimedCalls"]


class TimedCalls:
    """Times each call of a method, together with the function that the call returns, if any; in a
    `with` block until its end. `more`: seconds that each call is to take more."""

    def __init__(self, owner: Any, name: str, more: float = 0.0) -> None:
        self.seconds: list[float] = []
        """Seconds of each call."""
        self._undo = lambda: setattr(owner, name, method)
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            if more:
                time.sleep(more)
            found = method(*args, **kwargs)
            self.seconds.append(time.perf_counter() - started)
            return self._rest(found, len(self.seconds) - 1) if callable(found) else found

        setattr(owner, name, timed)

    def _rest(self, function: Callable[[], Any], call: int) -> Callable[[], Any]:
        def timed() -> Any:
            started = time.perf_counter()
            found = function()
            self.seconds[call] += time.perf_counter() - started
            return found

        return timed

    def __enter__(self) -> TimedCalls:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo()

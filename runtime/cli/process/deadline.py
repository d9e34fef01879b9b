"""`--stop-after`: a checkpoint and a distinct exit code before a queue's wall-clock limit."""

from __future__ import annotations

import os
import re
import time
from collections.abc import MutableMapping
from typing import Any

from ...kernel.errors import SettingError
from ...kernel.events import Request, RunStarted

__all__ = ["Deadline", "parse_duration", "set_deadline"]

_STOP_AT = "DRIVETRAIN_STOP_AT"
"""Environment: when to stop, in seconds since the epoch. Ranks that start late share it."""
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1, "": 1}
_PART = r"(\d+(?:\.\d+)?)\s*([dhms]?)\s*"


def parse_duration(text: str, option: str = "--stop-after") -> float:
    """Return the seconds of `55m`, `1h30m`, `2d` or a number of seconds. Raises `SettingError`."""
    parts = re.findall(_PART, text)
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if not re.fullmatch(f"({_PART})+", text.strip()) or seconds <= 0:
        raise SettingError(f"{option} is {text!r}; write a time such as 55m, 1h30m, 2d, or seconds")
    return seconds


def set_deadline(seconds: float, environment: MutableMapping[str, str]) -> None:
    """Set the deadline of this process, and of those that it starts. An earlier one stays."""
    environment.setdefault(_STOP_AT, str(time.time() + seconds))


class Deadline:
    """An observer that requests preemption when the deadline in the environment has passed."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        stop_at = float(environment.get(_STOP_AT, "inf"))
        # the wall clock may be set meanwhile
        self._at = time.monotonic() + stop_at - time.time()

    def __call__(self, event: Any) -> Request | None:
        if isinstance(event, RunStarted) or time.monotonic() < self._at:
            return None
        return Request.PREEMPT

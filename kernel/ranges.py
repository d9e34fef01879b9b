"""Which numbers may be asked for."""

from __future__ import annotations

import os
from typing import Any

from .errors import SettingError

__all__ = ["LARGEST", "check_range", "most_at_once", "short"]

LARGEST = 2**53
"""What is counted is added up over ranks exactly as long as it is less."""


def most_at_once() -> int:
    """More data workers, or threads, than this on this machine are a typing error, not a wish."""
    return max(64, 16 * (os.cpu_count() or 1))


def check_range(key: str, value: float | None, least: float, most: float = LARGEST) -> None:
    """Raises `SettingError` unless `value` is None or lies between both."""
    if value is None or least <= value <= most:
        return
    bound = f"at most {most}" if value > most else f"at least {least}"
    if value > most == most_at_once():
        bound += f" on a machine with {os.cpu_count()} CPUs"
    raise SettingError(f"{key} is {short(value)}; it must be {bound}")


def short(value: Any) -> str:
    """A number of a million digits is not printed whole, nor could it be."""
    if isinstance(value, int) and value.bit_length() > 100:
        return f"about {'-' if value < 0 else ''}10**{round(value.bit_length() * 0.30103)}"
    return f"{value!r:.200}"

"""Limits of a setting's values, in its type: `steps: Annotated[int, Range(1)]`."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from ..kernel.errors import SettingError

__all__ = ["LARGEST", "Choice", "Range", "check_ranges", "limits", "most_at_once", "short"]

LARGEST = 2**53
"""Upper bound of counts; below it, sums over ranks are exact."""


def most_at_once() -> int:
    """Return the upper limit of data workers and threads on this machine; a larger number is surely
    a typo."""
    return max(64, 16 * (os.cpu_count() or 1))


@dataclass(frozen=True)
class Range:
    """Numbers that are at least `least` or `above` a bound, and at most `most`; never NaN."""

    least: float | None = None
    above: float | None = None
    most: float = LARGEST
    of_machine: bool = False
    """True for at most `most_at_once()`."""
    unit: str = ""

    def check(self, key: str, value: Any, or_none: str) -> None:
        """Raises `SettingError` for a number that is out of range. `or_none`: text to add to the
        message if None is allowed."""
        most = most_at_once() if self.of_machine else self.most
        if self.above is not None and not value > self.above:
            bound = f"above {self.above:g}{or_none}"
        elif self.least is not None and not value >= self.least:
            bound = f"at least {self.least}"
        elif not value <= most:
            bound = f"at most {most}"
            bound += f" on a machine with {os.cpu_count()} CPUs" if self.of_machine else ""
        else:
            return
        raise SettingError(f"{key} is {short(value)}; it must be {bound}")


@dataclass(frozen=True)
class Choice:
    """One of these texts."""

    names: tuple[str, ...]

    def check(self, key: str, value: Any, or_none: str) -> None:
        """Raises `SettingError` for another text."""
        if value not in self.names:
            raise SettingError(f"{key} is {short(value)}; allowed: {', '.join(self.names)}")


def limits(hint: Any) -> Iterator[Range | Choice]:
    """Yield the limits in a type, which may be a union."""
    for found in (hint, *typing.get_args(hint)):
        for limit in getattr(found, "__metadata__", ()):
            if isinstance(limit, (Range, Choice)):
                yield limit


def check_ranges(settings: Any, prefix: str = "") -> None:
    """Check every field of a dataclass, and of those in it. Raises `SettingError`."""
    for name, hint in _annotated(type(settings)).items():
        value = getattr(settings, name)
        if value is not None:
            or_none = " or none" if type(None) in typing.get_args(hint) else ""
            for limit in limits(hint):
                limit.check(prefix + name, value, or_none)
        if dataclasses.is_dataclass(value):
            check_ranges(value, f"{prefix}{name}.")
        for number, part in enumerate(value if isinstance(value, tuple) else ()):
            if dataclasses.is_dataclass(part):
                check_ranges(part, f"{prefix}{name}.{number}.")


_annotated: Callable[[Any], dict[str, Any]] = cache(
    partial(typing.get_type_hints, include_extras=True)
)


def short(value: Any) -> str:
    """Return a value as text; a huge integer, which Python refuses to print, becomes a power of
    ten."""
    if isinstance(value, int) and value.bit_length() > 100:
        return f"about {'-' if value < 0 else ''}10**{round(value.bit_length() * 0.30103)}"
    return f"{value!r:.200}"

"""States of schedules as JSON: what JSON lacks is written as a dict with one marked key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["from_plain", "to_plain"]

_NUMBER, _ITEMS = "<number>", "<items>"


def to_plain(value: Any, where: str) -> Any:
    """The value in JSON types. Raises TypeError, naming the place in it, for what has none."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_plain(part, f"{where}.{key}") for key, part in value.items()}
        items = [[key, to_plain(part, f"{where}[{key!r}]")] for key, part in value.items()]
        return {_ITEMS: items}
    if isinstance(value, list | tuple):
        return [to_plain(part, f"{where}[{index}]") for index, part in enumerate(value)]
    if callable(item := getattr(value, "item", None)):  # a number of numpy's or torch's
        value = item()
    if isinstance(value, float) and not math.isfinite(value):
        return {_NUMBER: str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: no pickle is written"
    )


def from_plain(value: Any) -> Any:
    """What `to_plain` was given; tuples are lists."""
    if isinstance(value, Mapping):
        if value.keys() == {_NUMBER}:
            return float(value[_NUMBER])
        if value.keys() == {_ITEMS}:
            return {key: from_plain(part) for key, part in value[_ITEMS]}
        return {key: from_plain(part) for key, part in value.items()}
    return [from_plain(part) for part in value] if isinstance(value, list) else value

"""Converts states of schedules for a manifest, and reads JSON files of others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoint.format.strict_json import MAX_ITEMS, num_items
from ...checkpoint.storage.protocol import read_small
from ...kernel.errors import CheckpointDamaged

__all__ = ["from_plain", "read_json", "to_plain"]

_ITEMS = "<items>"
_NUMBER = "<number>"  # the form of non-finite numbers in earlier versions
_MAX_BYTES = 256 << 20


def read_json(path: Path) -> Any:
    """Read a file. Raises `CheckpointDamaged`, naming the file, for invalid JSON, and for too much
    of it."""
    raw = read_small(path, _MAX_BYTES)
    if (items := num_items(raw)) > MAX_ITEMS:
        raise CheckpointDamaged(f"{path}: holds about {items} items, and {MAX_ITEMS} are read")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} is no JSON: {error}") from error


def to_plain(value: Any, where: str) -> Any:
    """Convert a value to the types of a manifest. A mapping with keys that are not strings becomes
    a dict with one marked key. Raises TypeError, naming the place, for other types."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_plain(part, f"{where}.{key}") for key, part in value.items()}
        items = [[key, to_plain(part, f"{where}[{key!r}]")] for key, part in value.items()]
        return {_ITEMS: items}
    if isinstance(value, list | tuple):
        return [to_plain(part, f"{where}[{index}]") for index, part in enumerate(value)]
    if callable(item := getattr(value, "item", None)):  # a NumPy or torch scalar
        value = item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: no pickle is written"
    )


def from_plain(value: Any) -> Any:
    """Invert `to_plain`; tuples become lists."""
    if isinstance(value, Mapping):
        if value.keys() == {_NUMBER}:
            return float(value[_NUMBER])
        if value.keys() == {_ITEMS}:
            return {key: from_plain(part) for key, part in value[_ITEMS]}
        return {key: from_plain(part) for key, part in value.items()}
    return [from_plain(part) for part in value] if isinstance(value, list) else value

"""Positions in the data as a checkpoint stores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..kernel.batches import Position
from ..kernel.errors import DataError

__all__ = ["LARGEST", "position_from_json", "position_to_json"]

LARGEST = 1 << 62
"""Upper bound of all counts; far beyond every run."""


def position_to_json(position: Position) -> dict[str, Any]:
    """Return a mapping that `position_from_json` takes."""
    state = {} if position.state is None else {"state": dict(position.state)}
    return {"epoch": position.epoch, "samples": position.samples, **state}


def position_from_json(value: Any) -> Position:
    """Return a position. Raises `DataError` if it is malformed."""
    if not isinstance(value, Mapping):
        raise DataError(f"not a data position: {value!r:.200}")
    counts = [value.get("epoch"), value.get("samples")]
    if (
        not all(type(count) is int and 0 <= count < LARGEST for count in counts)
        or value.keys() - {"epoch", "samples", "state"}
        or not isinstance(value.get("state", {}), Mapping)
    ):
        raise DataError(f"not a data position: {dict(value)!r:.200}")
    return Position(**value)

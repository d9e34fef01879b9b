"""Events as records of plain JSON types; `record_file` reads them."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ..trainer.setting_values import flatten
from .record_file import Record

__all__ = ["Record", "plain", "record_of", "to_line"]


def record_of(event: Any) -> Record:
    """Convert an event to `{"event": "step_skipped", "time": ..., ...}` with its fields."""
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
    values = {item.name: plain(getattr(event, item.name)) for item in fields(event)}
    return {"event": name, "time": round(time.time(), 3), **values}


def plain(value: Any) -> Any:
    """Convert a value to JSON types. A float that is not finite becomes null, since JSON lacks
    it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return plain(flatten(value))
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return plain(value.item())
    return str(value)


def to_line(record: Mapping[str, Any]) -> str:
    """Return a record as one line of JSON."""
    return json.dumps(record, allow_nan=False) + "\n"

"""Events as records of plain JSON types, and the history that a sequence of records tells."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from ..trainer.settings import flatten

__all__ = ["history", "plain", "read_records", "record_of", "to_line"]

Record = dict[str, Any]


def record_of(event: Any) -> Record:
    """`{"event": "step_skipped", "time": ..., ...}` with the fields of the event."""
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
    values = {item.name: plain(getattr(event, item.name)) for item in fields(event)}
    return {"event": name, "time": round(time.time(), 3), **values}


def plain(value: Any) -> Any:
    """JSON types only. A float that is not finite becomes null: JSON has no word for it."""
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
    """One line of JSON."""
    return json.dumps(record, allow_nan=False) + "\n"


def read_records(path: Path) -> list[Record]:
    """The records of a file of lines; a line that was cut off by a crash is left out."""
    records: list[Record] = []
    if not path.is_file():
        return records
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and _is_counted(record):
                records.append(record)
    return records


def _is_counted(record: Record) -> bool:
    """Whether its steps are such, as far as it has any."""
    return all(isinstance(record.get(name) or 0, int) for name in ("step", "first_step"))


def history(records: Iterable[Record]) -> list[Record]:
    """The records that led to the present weights: what a run did after the step that it was later
    resumed from is left out."""
    kept: list[Record] = []
    for record in records:
        if record.get("event") == "run_started":
            first_step = record.get("first_step") or 0
            kept = [other for other in kept if (other.get("step") or 0) <= first_step]
        kept.append(record)
    return kept

"""Events as records of plain JSON types, and the history of a run in its records."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.catalog import as_metric
from ..trainer.setting_values import flatten

__all__ = ["history", "last", "plain", "read_records", "record_of", "to_line"]

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
    """The records of a file of lines; a line that was cut off by a crash, or that holds another
    thing than such a record does, is left out."""
    records: list[Record] = []
    if not path.is_file():
        return records
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
                if "\\ud" in line.lower():  # half a character, maybe, which no page can hold
                    whole = json.dumps(record, ensure_ascii=False).encode(errors="replace")
                    record = json.loads(whole)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and _is_sound(record):
                records.append(record)
    return records


def _is_sound(record: Record) -> bool:
    """True if the record has the fields that are read of it."""
    held = _HELD.get(str(record.get("event")), {})
    return (
        isinstance(record.get("event"), str)
        and all(isinstance(record.get(name) or 0, int) for name in ("step", "first_step"))
        and all(name in record and _is_a(record[name], kind) for name, kind in held.items())
        and _is_a(record.get("losses", {}), dict)
    )


def _is_a(value: Any, kind: type) -> bool:
    if kind is dict:
        return isinstance(value, dict) and all(_is_a(part, float) for part in value.values())
    if kind is float:
        return value is None or as_metric(value) is not None
    return isinstance(value, kind)


def last(records: Sequence[Record], event: str) -> Record | None:
    """The newest record of that event."""
    return next((record for record in reversed(records) if record["event"] == event), None)


_FIGURES = ("loss", "learning_rate", "grad_norm", "items_per_second", "total_steps")
_HELD: dict[str, dict[str, type]] = {
    "logged": {"step": int, "item_name": str, **dict.fromkeys(_FIGURES, float)},
    "evaluated": {"step": int, "name": str, "metrics": dict},
    "run_started": {"num_parameters": float},
    "run_ended": {"seconds": float},
}
"""Of each event, what the page of a run shows; a float may be null."""


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

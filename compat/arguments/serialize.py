"""Arguments as plain values: dict, JSON, text."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from typing import Any

import torch

__all__ = ["Serialization"]


class Serialization:
    """Arguments as dict, JSON and text. Tokens are masked, enums become their values."""

    def to_dict(self) -> dict[str, Any]:
        """Return every argument by name, as plain values; the constructor accepts each key."""
        return {
            item.name: _plain(item.name, getattr(self, item.name))
            for item in dataclasses.fields(self)  # type: ignore[arg-type]
            if item.init
        }

    def to_json_string(self) -> str:
        """Return `to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return only booleans, numbers and strings, for trackers, with both batch sizes of a
        process."""
        sizes = {name: getattr(self, name) for name in ("train_batch_size", "eval_batch_size")}
        simple = (bool, int, float, str, torch.Tensor)
        return {
            name: value if isinstance(value, simple) else str(value)
            for name, value in {**self.to_dict(), **sizes}.items()
        }

    def __str__(self) -> str:
        lines = [f"{name}={value},\n" for name, value in sorted(self.to_dict().items())]
        return f"{type(self).__name__}(\n{''.join(lines)})"

    __repr__ = __str__


def _plain(name: str, value: Any) -> Any:
    """Convert a value to JSON types, if possible."""
    if name.endswith("_token"):
        return f"<{name.upper()}>"
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, torch.dtype):
        return str(value).partition(".")[2]
    if isinstance(value, list | tuple):
        return [_plain("", inner) for inner in value]
    if isinstance(value, dict):
        return {key: _plain("", inner) for key, inner in value.items()}
    for method in ("to_dict", "to_json"):
        if hasattr(value, method):
            return getattr(value, method)()
    return value

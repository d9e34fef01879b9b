"""Reads booleans, numbers and dicts from files, texts and the environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ArgumentError

__all__ = ["as_numbers", "read_mapping", "truth"]

_TRUTHS = {"true": True, "yes": True, "on": True, "1": True}
_TRUTHS |= {"false": False, "no": False, "off": False, "0": False, "none": False, "": False}


def truth(value: Any, name: str) -> bool:
    """A boolean, or a text that spells one. Raises `ArgumentError`, with the name of what it is."""
    try:
        return value if isinstance(value, bool) else _TRUTHS[str(value).lower()]
    except KeyError:
        raise ArgumentError(f"{name} is {value!r}; it must be true or false") from None


def as_numbers(value: Any) -> Any:
    """Texts in a dict from a command line as the booleans and numbers that they spell."""
    if isinstance(value, dict):
        return {key: as_numbers(inner) for key, inner in value.items()}
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value.isdigit():
        return int(value)
    return float(value) if value.replace(".", "", 1).isdigit() else value


def read_mapping(value: Any, name: str) -> dict[str, Any]:
    """A field that is a dict, or the path of a JSON file, as a new dict; None is an empty one.

    Raises `ArgumentError` for a file that cannot be read or holds something else.
    """
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    try:
        text = value if str(value).startswith("{") else Path(value).read_text(encoding="utf-8")
        loaded = json.loads(text)
    except (OSError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{name} is {value!r}, neither a dict nor a readable JSON file: {error}"
        ) from error
    if not isinstance(loaded, dict):
        raise ArgumentError(f"{name} holds a {type(loaded).__name__}, not a JSON object: {value}")
    return loaded

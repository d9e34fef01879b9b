"""Reads booleans, numbers and dicts from files, texts and the environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...data.small_files import read_json
from ..errors import ArgumentError

__all__ = ["as_numbers", "read_mapping", "truth"]

_TRUTHS = {"true": True, "yes": True, "on": True, "1": True}
_TRUTHS |= {"false": False, "no": False, "off": False, "0": False, "none": False, "": False}


def truth(value: Any, name: str) -> bool:
    """Convert a boolean, or a string that spells one. Raises `ArgumentError` with the argument's
    name."""
    try:
        return value if isinstance(value, bool) else _TRUTHS[str(value).lower()]
    except KeyError:
        raise ArgumentError(f"{name} is {value!r}; it must be true or false") from None


def as_numbers(value: Any) -> Any:
    """Convert strings in a dict from a command line to the booleans and numbers that they spell."""
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
    """Return a field that is a dict or the path of a JSON file as a new dict; None gives an empty
    one.

    Raises `ArgumentError` for a file that cannot be read or holds something else.
    """
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    try:
        loaded = json.loads(value) if str(value).startswith("{") else read_json(value)
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{name} is {value!r:.400}, neither a dict nor a readable JSON file: {error}"
        ) from error
    if not isinstance(loaded, dict):
        kind = type(loaded).__name__
        raise ArgumentError(f"{name} holds a {kind}, not a JSON object: {value!s:.400}")
    return loaded

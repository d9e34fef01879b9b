"""Values of settings by dotted key: flat, parsed from text, checked against their fields' types."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from ..data.ranges import short
from ..kernel.errors import SettingError
from .former_names import present_names

__all__ = ["as_text", "check_types", "flatten", "override", "parse"]

T = TypeVar("T")


def check_types(settings: Any, prefix: str = "") -> None:
    """Raises `SettingError` for the first value that is not of its field's type."""
    for name, hint in _hints(type(settings)).items():
        value = getattr(settings, name)
        if not _fits(value, hint):
            raise _wrong_type(prefix + name, value, hint)
        if dataclasses.is_dataclass(value):
            check_types(value, f"{prefix}{name}.")
        for number, part in enumerate(value if isinstance(value, tuple) else ()):
            if dataclasses.is_dataclass(part):
                check_types(part, f"{prefix}{name}.{number}.")


_hints: Callable[[Any], dict[str, Any]] = cache(typing.get_type_hints)
"""Cached type hints of a class: its annotations are strings, which Python would compile each time.
"""


def _fits(value: Any, hint: Any) -> bool:
    """True if the value fits the type. An int is a valid float; a bool is not a valid int."""
    origin, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts
    if origin is tuple:
        return isinstance(value, (tuple, list)) and all(_fits(part, parts[0]) for part in value)
    if origin is dict:
        return isinstance(value, dict)
    if isinstance(value, bool):
        return origin is bool
    try:
        return isinstance(value, (int, float) if origin is float else origin)
    except TypeError:  # a type that cannot be checked
        return False


def _wrong_type(key: str, value: Any, hint: Any) -> SettingError:
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    if typing.get_origin(hint) is typing.Literal:
        return SettingError(f"{key} is {value!r}; allowed: {', '.join(options)}")
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = options[0]
    name = getattr(typing.get_origin(hint) or hint, "__name__", str(hint))
    return SettingError(f"{key} is {short(value)}, which is not of type {name}")


def flatten(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Return the value of each dotted key, in order of declaration."""
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(settings):
        value = getattr(settings, item.name)
        if dataclasses.is_dataclass(value):
            flat.update(flatten(value, f"{prefix}{item.name}."))
        elif isinstance(value, tuple):
            flat[prefix + item.name] = tuple(map(_table, value))
        else:
            flat[prefix + item.name] = value
    return flat


def _table(value: Any) -> Any:
    """Convert a dataclass in a list to a table of its non-default values."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    defaults = vars(type(value)())
    return {name: part for name, part in vars(value).items() if part != defaults[name]}


def override(settings: T, values: Mapping[str, Any], prefix: str = "") -> T:
    """Return a copy with the dotted keys replaced. Strings are parsed by the field's type.

    A key below a dict field (`optimizer.args.momentum`) sets one entry. Raises `SettingError` with
    the key, the value seen, and the nearest known key or the expected type.
    """
    changes: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    hints = _hints(type(settings))
    for key, value in (values if prefix else present_names(values)).items():
        head, _, rest = key.partition(".")
        if head not in hints:
            known = list(flatten(settings))
            last = key.rpartition(".")[2]
            near = [each for each in known if each.rpartition(".")[2] == last]
            near = near or difflib.get_close_matches(key, known, n=1)
            meant = " or ".join(prefix + each for each in near)
            hint = f"did you mean {meant}?" if near else f"known: {', '.join(known)}"
            raise SettingError(f"unknown setting {prefix}{key!s}; {hint}")
        if rest:
            nested.setdefault(head, {})[rest] = value
        else:
            changes[head] = parse(prefix + key, value, hints[head])
    for head, inner in nested.items():
        current = changes.get(head, getattr(settings, head))
        if dataclasses.is_dataclass(current):
            changes[head] = override(current, inner, f"{prefix}{head}.")
        elif isinstance(current, dict):
            parsed = {name: _literal(value) for name, value in inner.items()}
            changes[head] = {**current, **parsed}
        else:
            raise SettingError(
                f"setting {prefix}{head} has no parts, so {next(iter(inner))!r} "
                f"cannot be set in it; set {prefix}{head} itself"
            )
    return dataclasses.replace(settings, **changes)  # type: ignore[type-var]


def parse(key: str, value: Any, hint: Any) -> Any:
    """Convert `value` (a string, or already a value) to the type `hint`. Raises `SettingError`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if type(None) in options and value in (None, "none", "None", "null"):
            return None
        hint = next(option for option in options if option is not type(None))
    origin = typing.get_origin(hint) or hint
    if hint is Any:
        return _literal(value)
    if origin is typing.Literal:
        if value in typing.get_args(hint):
            return value
        raise _wrong_type(key, value, hint)
    if origin is tuple and dataclasses.is_dataclass(typing.get_args(hint)[0]):
        tables = _literal(value) if value != "" else ()
        if isinstance(tables, (list, tuple)):
            kind = typing.get_args(hint)[0]
            return tuple(_from_table(f"{key}.{n}", part, kind) for n, part in enumerate(tables))
    elif origin is tuple:
        parts = value.split(",") if isinstance(value, str) else value
        if isinstance(parts, (list, tuple)):
            return tuple(parse(key, part, typing.get_args(hint)[0]) for part in parts if part != "")
    elif origin is dict:
        parsed = _literal(value)
        if isinstance(parsed, dict):
            return parsed
    elif isinstance(value, str) and origin is not str:
        parsed = _literal(value)
        if _fits(parsed, hint):
            return _as_float(parsed) if origin is float else parsed
    elif _fits(value, hint):
        return _as_float(value) if origin is float else value
    raise _wrong_type(key, value, hint)


def as_text(value: Any) -> str:
    """Return the value of a setting as `parse` takes it, such as on the command line."""
    if isinstance(value, tuple) and not any(isinstance(part, dict) for part in value):
        return ",".join(map(str, value))
    has_json = value is None or isinstance(value, bool | int | float | dict | list | tuple)
    return json.dumps(value) if has_json else str(value)


def _from_table(key: str, value: Any, kind: type) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, dict):
        known = ", ".join(item.name for item in dataclasses.fields(kind))
        raise SettingError(f"{key} is {short(value)}; it must be a table of {known}")
    return override(kind(), value, f"{key}.")


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _literal(value: Any) -> Any:
    """Parse a JSON literal (`True` and `1e-3` too); return any other string unchanged."""
    if not isinstance(value, str):
        return value
    named: dict[str, Any] = {"True": True, "False": False, "None": None, "none": None}
    if value in named:
        return named[value]
    try:
        return json.loads(value)
    except ValueError:
        try:
            return float(value)
        except ValueError:
            return value

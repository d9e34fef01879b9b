"""The JSON schema (draft 2020-12) of configuration files, so that an editor completes and checks
them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...data.ranges import Choice, Range, limits
from ...registry import find_driver, known_backends
from ...trainer.settings import Settings
from .recipe_file import Incomplete, load_recipe_file

__all__ = ["schema", "schema_of"]

Schema = dict[str, Any]

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def schema(recipe: Path | None = None) -> Schema:
    """Return the schema of all settings and of the options of all known drivers. With a recipe
    file, add the recipe's configuration. Raises `RecipeError`.
    """
    config = None if recipe is None else load_recipe_file(recipe).config
    options = [schema_of(find_driver(name).options_type(), name) for name in known_backends()]
    backend: Schema = {"type": "object", "additionalProperties": False, "properties": {}}
    for part in options:
        for name, value in part["properties"].items():
            known = backend["properties"].setdefault(name, {"anyOf": []})["anyOf"]
            known.append(value)
    names = {"type": "string", "description": "The driver; see `drivetrain backends`."}
    backend["properties"]["name"] = names
    whole = schema_of(Settings())
    file = {"type": "string", "description": "The recipe file, relative to this one."}
    if isinstance(config, Incomplete):
        config = config.kind
    own: Schema = {"type": "object"} if config is None else schema_of(config)
    own["properties"] = {**own.get("properties", {}), "file": file}
    whole["properties"] |= {
        "recipe": {"anyOf": [file, own]},
        "backend": {"anyOf": [names, backend]},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "drivetrain configuration",
        **whole,
    }


def schema_of(settings: Any, of_driver: str = "") -> Schema:
    """Return the schema of a dataclass. Give an instance, whose values are the defaults, or the
    class where some fields have no default."""
    kind = settings if isinstance(settings, type) else type(settings)
    hints, texts = typing.get_type_hints(kind, include_extras=True), dict(_field_texts(kind))
    properties = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name, None)
        if dataclasses.is_dataclass(value):
            properties[field.name] = schema_of(value)
            continue
        text = texts.get(field.name, "")
        text = f"[{of_driver}] {text}".strip() if of_driver else text
        described = {"description": text} if text else {}
        properties[field.name] = {**_of_type(hints[field.name]), **described, **_default(value)}
    about = inspect.getdoc(kind) or ""
    return {
        "type": "object",
        "additionalProperties": False,
        "description": about.split("\n\n")[0].replace("\n", " "),
        "properties": properties,
    }


def _of_type(hint: Any) -> Schema:
    if hasattr(hint, "__metadata__"):
        plain = _of_type(typing.get_args(hint)[0])
        for limit in limits(hint):
            plain |= _limited(limit)
        return plain
    origin, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = [_of_type(part) for part in parts if part is not type(None)]
        without = [{"type": "null"}, {"const": "none"}] if type(None) in parts else []
        return {"anyOf": [*options, *without]}  # TOML has no null
    if origin is typing.Literal:
        return {"enum": list(parts)}
    if dataclasses.is_dataclass(origin):
        return schema_of(typing.cast(type, origin)())
    if origin is tuple:
        return {"type": "array", "items": _of_type(parts[0])}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object"}
    return {"type": _TYPES[origin]} if origin in _TYPES else {}


def _limited(limit: Range | Choice) -> Schema:
    """Return the bounds and the unit of a number, or the allowed texts."""
    if isinstance(limit, Choice):
        return {"enum": list(limit.names)}
    bounds = {"minimum": limit.least, "exclusiveMinimum": limit.above}
    if not limit.of_machine:  # else the schema would hold only on machines like this one
        bounds["maximum"] = limit.most
    unit = {"$comment": limit.unit} if limit.unit else {}
    return {**{name: bound for name, bound in bounds.items() if bound is not None}, **unit}


def _default(value: Any) -> Schema:
    """Return the default, where JSON can express it."""
    if isinstance(value, tuple):
        value = list(value)
    return {"default": value} if isinstance(value, (bool, int, float, str, list, dict)) else {}


def _field_texts(kind: type) -> Iterator[tuple[str, str]]:
    """Yield the text below each field of a dataclass, base classes first."""
    for base in reversed([each for each in kind.__mro__ if dataclasses.is_dataclass(each)]):
        try:
            (parsed,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, SyntaxError):  # a class that no file holds
            continue
        assert isinstance(parsed, ast.ClassDef)
        for field, text in zip(parsed.body, parsed.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(words))):
                    yield name, " ".join(words.split())

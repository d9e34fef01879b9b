"""Configuration files: the keys of `--set` in TOML, YAML or JSON, or the `config.json` of a run.

::

    recipe = "my.py"                  # beside this file; or [recipe] file = "my.py"
    steps = 1000

    [optimizer]
    lr = 3e-4

    [recipe]                          # the recipe's own configuration
    file = "my.py"
    width = 256

    [backend]                         # the driver, and its options
    name = "fsdp"
    shard_size = 8
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..kernel.errors import SettingError
from .resolve_settings import Layer, lifting_steps

__all__ = ["ConfigFiles", "read_config_files"]


@dataclass(frozen=True)
class ConfigFiles:
    """All files together; of the recipe and the driver the last that names one counts."""

    recipe: Path | None
    backend: str | None
    layers: Sequence[Layer]
    """One for each file; later ones win."""


def read_config_files(paths: Sequence[Path]) -> ConfigFiles:
    """Raises `SettingError`, naming the file, for one that cannot be read."""
    recipe, backend, layers = None, None, []
    for path in paths:
        found = _read(path)
        values = _of_a_run(found) if {"given", "settings"} <= found.keys() else dict(_flat(found))
        file = values.pop("recipe.file", values.pop("recipe", None))
        name = values.pop("backend.name", values.pop("backend", None))
        for key, value in (("recipe", file), ("backend", name)):
            if not isinstance(value, str | None):
                raise SettingError(f"{path}: {key} is {value!r:.80}, which is not a text")
        recipe = recipe if file is None else path.parent / file
        backend = name or backend
        layers.append((str(path), lifting_steps(values)))
    return ConfigFiles(recipe, backend, layers)


def _of_a_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """The file that a run wrote: what it was given, and not what it made of that."""
    given = config["given"]
    if not isinstance(given, dict):
        raise SettingError(f"given is {given!r:.80}, which is not a table")
    return {**given, "recipe": config.get("recipe"), "backend": config.get("backend")}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys; an empty table is a value."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read(path: Path) -> Mapping[str, Any]:
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise SettingError(f"--config {path}: its name must end in {', '.join(_PARSERS)}")
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise SettingError(f"--config {path} holds {found!r:.80}; it must be a table of settings")
    return found


def _toml(text: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found]
    return tomllib.loads(text)


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise SettingError("YAML files need the package pyyaml: pip install pyyaml") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from error


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    ".toml": _toml,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".json": json.loads,
}

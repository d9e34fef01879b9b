"""Settings that are requested by options and configuration files.

Configuration files have the keys of `--set` in TOML, YAML or JSON, or the `config.json` of a run.

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data.small_files import PARSERS, read_table
from ...kernel.errors import SettingError
from .recipe_file import TRANSFORMERS_RECIPE
from .resolve_settings import COMMAND_LINE, Layer, lifting_steps, parse_pairs

__all__ = ["TRANSFORMERS", "Requested", "of_transformers", "read_config_files", "requested"]

TRANSFORMERS = "hf:"
"""Precedes the path of a model's configuration, in place of a recipe."""


@dataclass(frozen=True)
class Requested:
    """The recipe, driver and settings that are requested; None where none is named."""

    recipe: Path | None
    backend: str | None
    layers: Sequence[Layer]
    """One for each file, then one for the options; later ones win."""


def requested(
    recipe: Path | None,
    backend: str | None,
    config: Sequence[Path] | None,
    pairs: Sequence[str] | None,
    shorthands: Mapping[str, Any] | None = None,
) -> Requested:
    """Combine the options `--backend`, `--config` and `--set` with the recipe argument and the
    `SHORTHANDS`. Options win over files. Raises `SettingError`."""
    files = read_config_files(config or ())
    given = parse_pairs(pairs or (), shorthands or {})
    path, layers = of_transformers(recipe or files.recipe, [*files.layers, given])
    return Requested(path, files.backend if backend is None else backend, layers)


def of_transformers(
    recipe: Path | None, layers: Sequence[Layer]
) -> tuple[Path | None, Sequence[Layer]]:
    """Return the recipe file of `hf:CONFIG.json`, with a layer that has the path; any other recipe
    is returned as it is."""
    if recipe is None or not str(recipe).startswith(TRANSFORMERS):
        return recipe, layers
    model = str(recipe).removeprefix(TRANSFORMERS)
    return TRANSFORMERS_RECIPE, [(COMMAND_LINE, {"recipe.model": model}), *layers]


def read_config_files(paths: Sequence[Path]) -> Requested:
    """Read all files; the last one that names a recipe or a driver decides. Raises `SettingError`,
    naming the file, for one that cannot be read."""
    recipe, backend, layers = None, None, []
    for path in paths:
        found = _read(path)
        values = _of_a_run(found) if {"given", "settings"} <= found.keys() else dict(_flat(found))
        file = values.pop("recipe.file", values.pop("recipe", None))
        name = values.pop("backend.name", values.pop("backend", None))
        for key, value in (("recipe", file), ("backend", name)):
            if not isinstance(value, str | None):
                raise SettingError(f"{path}: {key} is {value!r:.80}, which is not a text")
        recipe = recipe if file is None else _beside(path, file)
        backend = name or backend
        layers.append((str(path), lifting_steps(values)))
    return Requested(recipe, backend, layers)


def _of_a_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the file that a run wrote: the settings that it was given, not all that it resolved."""
    given = config["given"]
    if not isinstance(given, dict):
        raise SettingError(f"given is {given!r:.80}, which is not a table")
    return {**given, "recipe": config.get("recipe"), "backend": config.get("backend")}


def _beside(path: Path, recipe: str) -> Path:
    """Return the recipe that a file names, whose path begins at the file's folder."""
    prefix = TRANSFORMERS if recipe.startswith(TRANSFORMERS) else ""
    return Path(f"{prefix}{path.parent / recipe.removeprefix(prefix)}")


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; an empty table is a value."""
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read(path: Path) -> Mapping[str, Any]:
    if path.suffix.lower() not in PARSERS:
        raise SettingError(f"--config {path}: its name must end in {', '.join(PARSERS)}")
    try:
        found = read_table(path)
    except ImportError as error:
        raise SettingError("YAML files need the package pyyaml: pip install pyyaml") from error
    except (OSError, ValueError) as error:
        raise SettingError(f"--config {path} cannot be read: {error!s:.400}") from error
    if not isinstance(found, dict):
        raise SettingError(f"--config {path} holds {found!r:.80}; it must be a table of settings")
    return found

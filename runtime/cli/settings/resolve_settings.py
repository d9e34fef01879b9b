"""Resolves files and `--set KEY=VALUE` to settings, recipe configuration and driver options.

A key that starts with `recipe.` belongs to the recipe's configuration, one that starts with
`backend.` to the driver's options, any other to the kernel's settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...kernel.contract import Driver
from ...kernel.errors import SettingError
from ...kernel.plan import Plan
from ...registry import refuse_unpromised
from ...trainer.setting_values import flatten, override
from ...trainer.settings import Settings
from .recipe_file import RecipeFile
from .train_options import SHORTHANDS

__all__ = [
    "COMMAND_LINE",
    "RESUMED",
    "Layer",
    "Resolved",
    "lifting_steps",
    "merge",
    "parse_pairs",
    "planned",
    "refuse_early",
    "resolve",
    "resumed_layer",
    "without_backend",
]


@dataclass(frozen=True)
class Resolved:
    """The values of a run; `sources` and `values` are by dotted key."""

    settings: Settings
    config: Any
    backend_options: Mapping[str, Any]
    values: Mapping[str, Any]
    sources: Mapping[str, str]
    """default, recipe, resumed run, command line, or the path of a file."""


COMMAND_LINE = "command line"
RESUMED = "resumed run"

Layer = tuple[str, Mapping[str, Any]]
"""The source of some values, and the values by dotted key."""


def parse_pairs(pairs: Sequence[str], shorthands: Mapping[str, Any]) -> Layer:
    """Return the values of all `--set KEY=VALUE`, then those of the `SHORTHANDS` that were given. A
    flag that is False was not given."""
    chosen: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise SettingError(f"--set {pair!r} is not of the form KEY=VALUE, such as seed=1")
        chosen[key.strip()] = value.strip()
    given = {SHORTHANDS[name]: value for name, value in shorthands.items()}
    chosen.update({k: v for k, v in given.items() if v is not None and v is not False})
    return COMMAND_LINE, lifting_steps(chosen)


def lifting_steps(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Unset `steps` where only `epochs` is given, since an earlier value would win otherwise."""
    lifts = "epochs" in values and "steps" not in values
    return {**values, "steps": None} if lifts else values


def resumed_layer(config: Mapping[str, Any], driver: Driver) -> Layer:
    """Return the values that the run of that `config.json` was given, without options of another
    driver."""
    own = driver.name == config.get("backend")
    given = config.get("given", {})
    return RESUMED, {key: v for key, v in given.items() if own or not key.startswith("backend.")}


def without_backend(layers: Iterable[Layer]) -> list[Layer]:
    """Remove the options of a driver from the layers, where no driver is chosen, or several are."""
    return [
        (source, {key: v for key, v in values.items() if not key.startswith("backend.")})
        for source, values in layers
    ]


def merge(layers: Iterable[Layer]) -> dict[str, Any]:
    """Return all values by dotted key; later layers win."""
    merged: dict[str, Any] = {}
    for _, values in layers:
        for key in values:
            for part in [known for known in merged if known.startswith(f"{key}.")]:
                del merged[part]
        merged.update(values)
    return merged


def resolve(recipe_file: RecipeFile, driver: Driver, layers: Sequence[Layer]) -> Resolved:
    """Apply each layer over those before it, over the recipe's own settings, over defaults.

    Raises `SettingError` for an unknown or ill-typed key, naming the nearest, and its file.
    """
    settings, config, options = recipe_file.settings, recipe_file.config, driver.options_type()
    for source, values in layers:
        with _naming(source):
            parts = _split(values)
            settings = override(settings, parts["settings"])
            config = recipe_file.configure(config, parts["recipe"])
            options = override(options, parts["backend"], prefix="backend.")
    recipe_file.refuse_incomplete(config)
    values = flatten(settings)
    defaults = flatten(Settings())
    sources = {
        key: "default" if value == defaults[key] else "recipe"
        for key, value in flatten(recipe_file.settings).items()
    }
    for prefix, part in (("recipe.", config), ("backend.", options)):
        flat = {} if part is None else flatten(part, prefix)
        values.update(flat)
        sources.update(dict.fromkeys(flat, "default"))
    for source, keys in layers:
        for key in values:
            if key in keys or any(chosen.startswith(f"{key}.") for chosen in keys):
                sources[key] = source
    backend_options = _split(merge(layers))["backend"]
    return Resolved(settings, config, backend_options, values, sources)


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """Prefix an error with the path of the file that it is about."""
    try:
        yield
    except SettingError as error:
        if source in (COMMAND_LINE, RESUMED):
            raise
        raise SettingError(f"{source}: {error}") from error


def refuse_early(driver: Driver, layers: Sequence[Layer]) -> None:
    """Check what is known without the recipe, before ranks are started for it. Raises
    `SettingError` and `CapabilityRefused`."""
    refuse_unpromised(driver, planned(driver, layers))


def planned(driver: Driver, layers: Sequence[Layer]) -> Plan:
    """Return the driver's part of the settings, as far as they are known without the recipe. Raises
    `SettingError`."""
    settings, options = Settings(), driver.options_type()
    for source, values in layers:
        with _naming(source):
            parts = _split(values)
            settings = override(settings, parts["settings"])
            options = override(options, parts["backend"], prefix="backend.")
    return settings.plan(options)


def _split(chosen: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = {"settings": {}, "recipe": {}, "backend": {}}
    for key, value in chosen.items():
        head, dot, rest = key.partition(".")
        if dot and head in ("recipe", "backend"):
            parts[head][rest] = value
        else:
            parts["settings"][key] = value
    return parts

"""From files and `--set KEY=VALUE` to settings, recipe configuration and driver options.

A key that starts with `recipe.` belongs to the recipe's configuration, one that starts with
`backend.` to the driver's options, any other to the kernel's settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..kernel.contract import Driver
from ..kernel.errors import SettingError
from ..kernel.registry import refuse_unpromised
from ..trainer.setting_values import flatten, override
from ..trainer.settings import Settings
from .recipe_file import RecipeFile

__all__ = [
    "COMMAND_LINE",
    "RESUMED",
    "Layer",
    "Resolved",
    "lifting_steps",
    "merge",
    "parse_pairs",
    "refuse_early",
    "resolve",
    "resumed_layer",
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
    """Key -> text of all `--set`, then the shorthands that were given (`--steps` is `steps`)."""
    chosen: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise SettingError(f"--set {pair!r} is not of the form KEY=VALUE, such as seed=1")
        chosen[key.strip()] = value.strip()
    chosen.update({key: value for key, value in shorthands.items() if value is not None})
    return COMMAND_LINE, lifting_steps(chosen)


def lifting_steps(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """`epochs` alone lifts a number of steps that was set before, which would else decide."""
    lifts = "epochs" in values and "steps" not in values
    return {**values, "steps": None} if lifts else values


def resumed_layer(config: Mapping[str, Any], driver: Driver) -> Layer:
    """The values that the run of that `config.json` was given, without another driver's options."""
    own = driver.name == config.get("backend")
    given = config.get("given", {})
    return RESUMED, {key: v for key, v in given.items() if own or not key.startswith("backend.")}


def merge(layers: Iterable[Layer]) -> dict[str, Any]:
    """All values by dotted key, later ones over earlier ones."""
    merged: dict[str, Any] = {}
    for _, values in layers:
        for key in values:
            for part in [known for known in merged if known.startswith(f"{key}.")]:
                del merged[part]
        merged.update(values)
    return merged


def resolve(recipe_file: RecipeFile, driver: Driver, layers: Sequence[Layer]) -> Resolved:
    """Each layer over those before it, over the recipe's own settings, over defaults.

    Raises `SettingError` for an unknown or ill-typed key, naming the nearest, and its file.
    """
    settings, config, options = recipe_file.settings, recipe_file.config, driver.options_type()
    for source, values in layers:
        with _naming(source):
            parts = _split(values)
            settings = override(settings, parts["settings"])
            config = recipe_file.configure(config, parts["recipe"])
            options = override(options, parts["backend"], prefix="backend.")
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
    """An error of a file says which; that of the command line is plain."""
    try:
        yield
    except SettingError as error:
        if source in (COMMAND_LINE, RESUMED):
            raise
        raise SettingError(f"{source}: {error}") from error


def refuse_early(driver: Driver, layers: Sequence[Layer]) -> None:
    """Check what is known without the recipe, before ranks are started for it. Raises
    `SettingError` and `CapabilityRefused`."""
    settings, options = Settings(), driver.options_type()
    for source, values in layers:
        with _naming(source):
            parts = _split(values)
            settings = override(settings, parts["settings"])
            options = override(options, parts["backend"], prefix="backend.")
    refuse_unpromised(driver, settings.plan(options))


def _split(chosen: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = {"settings": {}, "recipe": {}, "backend": {}}
    for key, value in chosen.items():
        head, dot, rest = key.partition(".")
        if dot and head in ("recipe", "backend"):
            parts[head][rest] = value
        else:
            parts["settings"][key] = value
    return parts

"""From `--set KEY=VALUE` to settings, recipe configuration and driver options, with their sources.

A key that starts with `recipe.` belongs to the recipe's configuration, one that starts with
`backend.` to the driver's options, any other to the kernel's settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..kernel.contract import Driver
from ..kernel.errors import SettingError
from ..kernel.registry import refuse_unpromised
from ..trainer.setting_values import flatten, override
from ..trainer.settings import Settings
from .recipe_file import RecipeFile

__all__ = ["Resolved", "parse_pairs", "refuse_early", "resolve"]


@dataclass(frozen=True)
class Resolved:
    """What a run is made with; `sources` and `values` go by dotted key."""

    settings: Settings
    config: Any
    backend_options: Mapping[str, Any]
    values: Mapping[str, Any]
    sources: Mapping[str, str]
    """default, recipe, resumed run or command line."""


def parse_pairs(pairs: Sequence[str], shorthands: Mapping[str, Any]) -> dict[str, Any]:
    """Key -> text of all `--set`, then the shorthands that were given (`--steps` is `steps`).

    `epochs` alone lifts a number of steps that the recipe set, which would else decide.
    """
    chosen: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise SettingError(f"--set {pair!r} is not of the form KEY=VALUE, such as seed=1")
        chosen[key.strip()] = value.strip()
    chosen.update({key: value for key, value in shorthands.items() if value is not None})
    if "epochs" in chosen and "steps" not in chosen:
        chosen["steps"] = None
    return chosen


def resolve(
    recipe_file: RecipeFile, driver: Driver, resumed: Mapping[str, Any], given: Mapping[str, Any]
) -> Resolved:
    """`given` (the command line) over `resumed` (an earlier run's) over the recipe's over defaults.

    Raises `SettingError` for an unknown or ill-typed key, naming the nearest.
    """
    parts = _split({**resumed, **given})
    settings = override(recipe_file.settings, parts["settings"])
    config = recipe_file.configure(parts["recipe"])
    options = override(driver.options_type(), parts["backend"], prefix="backend.")
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
    for source, keys in (("resumed run", resumed), ("command line", given)):
        for key in values:
            if key in keys or any(chosen.startswith(f"{key}.") for chosen in keys):
                sources[key] = source
    return Resolved(settings, config, parts["backend"], values, sources)


def refuse_early(driver: Driver, resumed: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises what can be told without the recipe, before ranks are started for it: `SettingError`,
    `CapabilityRefused`."""
    parts = _split({**resumed, **given})
    settings = override(Settings(), parts["settings"])
    options = override(driver.options_type(), parts["backend"], prefix="backend.")
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

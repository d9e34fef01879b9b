"""The way to place its ranks that `drivetrain train --backend auto` takes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ...kernel.errors import SettingError
from ...kernel.recipe import Recipe
from ...planning.automatic import Watchers, taken
from ...planning.processes import Found
from ...planning.search import VARIED, Search
from ...run.quoted import say
from ...run.tables import open_console
from ..process.launch import Launch
from ..report.looking import looking
from ..settings.plan import plan_record, show_plan
from ..settings.resolve_settings import Layer, Resolved

__all__ = ["PLAN", "check_plan", "take"]

PLAN = "plan"
"""The source of values that a plan has chosen."""
_TOP = 10


def check_plan(backend: str, launch: Launch) -> None:
    """Raises `SettingError` where there is nothing to choose from."""
    if backend != "auto":
        raise SettingError(f"--plan shows what auto chooses from; leave --backend {backend} out")
    if launch.nproc < 2 or launch.nnodes not in (None, "1", "1:1"):
        raise SettingError(
            "--plan compares the ways to place several ranks of one machine; give --nproc, or see "
            "`drivetrain plan` for other machines"
        )


def take(
    recipe_path: Path, recipe: Recipe, resolved: Resolved, layers: Sequence[Layer], shows: bool
) -> tuple[str, Layer] | None:
    """Return the backend that `auto` takes, with the values that its way to place the ranks needs.
    None if it is the one that `auto` takes without a plan. `shows`: look in any case, and print all
    ways."""
    given = {name for name in VARIED if resolved.sources[name] != "default"}

    def show(found: Found, search: Search) -> None:
        if shows:
            record = plan_record(found, search, resolved, recipe_path, layers)
            show_plan(record, _TOP, open_console(stderr=True))

    watchers = Watchers(say, show, partial(looking, "looking at ways to place the run"))
    way = taken(recipe, resolved.settings, given, watchers, always=shows)
    if way is None:
        return None
    options = {f"backend.{name}": value for name, value in way.options.items()}
    return way.backend, (PLAN, {**way.settings, **options})

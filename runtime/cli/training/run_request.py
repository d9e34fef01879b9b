"""Requests to use the recipe and settings of an earlier run again, on any driver and any number of
ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ...data.parent import end_with_launcher
from ...kernel.contract import Driver
from ...kernel.paths import place
from ...kernel.recipe import Recipe
from ...launched import adopt_slurm, is_launched
from ...registry import usable_driver
from ...run.run_folder import Earlier, find_earlier, recorded_recipe
from ..process.launch import Launch, check_ranks, run_ranks
from ..process.outcomes import FINISHED, note_outcome
from ..settings.config_files import Requested
from ..settings.recipe_file import DEFAULT_RECIPE, RecipeFile, load_recipe_file
from ..settings.resolve_settings import Resolved, resolve, resumed_layer

__all__ = ["LoadedRun", "RunRequest", "on_ranks"]


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """Arguments of the command line; None where an argument was left out."""

    run: str
    requested: Requested
    nproc: int


@dataclass(frozen=True)
class LoadedRun:
    """An earlier run, with its recipe and settings loaded for a driver."""

    earlier: Earlier
    driver: Driver
    recipe_file: RecipeFile
    resolved: Resolved
    recipe: Recipe


def on_ranks(request: RunRequest, act: Callable[[LoadedRun], int]) -> int:
    """Call `act` on each rank, or launch the ranks that do; return the exit code. Raises
    `DrivetrainError`."""
    adopt_slurm(os.environ)
    end_with_launcher()
    earlier = find_earlier(place(request.run))
    driver = usable_driver(request.requested.backend or "auto")
    check_ranks(request.nproc, driver)
    if request.nproc > 1 and not is_launched():
        return run_ranks(Launch(request.nproc), sys.argv[1:])
    recipe = request.requested.recipe or recorded_recipe(earlier, DEFAULT_RECIPE)
    recipe_file = load_recipe_file(recipe)
    layers = [resumed_layer(earlier.config, driver), *request.requested.layers]
    resolved = resolve(recipe_file, driver, layers)
    built = recipe_file.build(resolved.config)
    code = act(LoadedRun(earlier, driver, recipe_file, resolved, built))
    note_outcome(code, FINISHED)
    return code

"""What commands ask of a run that was: its recipe and settings again, on any driver and ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..data.parent import end_with_launcher
from ..kernel.contract import Driver
from ..kernel.paths import place
from ..kernel.recipe import Recipe
from ..kernel.registry import usable_driver
from .config_files import ConfigFiles
from .failure import FINISHED, note_outcome
from .launch import Launch, adopt_slurm, check_ranks, is_launched, run_ranks
from .recipe_file import DEFAULT_RECIPE, RecipeFile, load_recipe_file
from .resolve_settings import Layer, Resolved, resolve, resumed_layer
from .run_folder import Earlier, find_earlier

__all__ = ["LoadedRun", "RunRequest", "on_ranks"]


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What was asked for on the command line; None where nothing was said."""

    run: str
    recipe: Path | None
    backend: str | None
    files: ConfigFiles
    given: Layer
    nproc: int


@dataclass(frozen=True)
class LoadedRun:
    """A run of which something is asked."""

    earlier: Earlier
    driver: Driver
    recipe_file: RecipeFile
    resolved: Resolved
    recipe: Recipe


def on_ranks(request: RunRequest, act: Callable[[LoadedRun], int]) -> int:
    """Act on each rank, or launch the ranks that do; the exit code. Raises `DrivetrainError`."""
    adopt_slurm(os.environ)
    end_with_launcher()
    earlier = find_earlier(place(request.run))
    driver = usable_driver(request.backend or request.files.backend or "auto")
    check_ranks(request.nproc, driver)
    if request.nproc > 1 and not is_launched():
        return run_ranks(Launch(request.nproc), sys.argv[1:])
    recorded = earlier.config.get("recipe") or DEFAULT_RECIPE
    recipe_file = load_recipe_file(request.recipe or request.files.recipe or Path(recorded))
    layers = [resumed_layer(earlier.config, driver), *request.files.layers, request.given]
    resolved = resolve(recipe_file, driver, layers)
    recipe = recipe_file.build(resolved.config)
    code = act(LoadedRun(earlier, driver, recipe_file, resolved, recipe))
    note_outcome(code, FINISHED)
    return code

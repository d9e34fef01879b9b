"""Refusals of `drivetrain train`, made before a job is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...registry import find_driver, refuse_unpromised
from ..settings.config_files import requested
from ..settings.recipe_file import load_recipe_file
from ..settings.resolve_settings import planned, resolve, without_backend
from ..settings.train_options import SHORTHANDS

__all__ = ["check_arguments"]


def check_arguments(given: Mapping[str, Any], ranks: int, gpus: bool, here: bool) -> None:
    """Raise the errors that `drivetrain train` would raise about settings, recipe file and driver.

    `given`: its parameters by name. `gpus`: True if the job has GPUs; the devices of this machine
    are not checked then. `here`: True if the job's files are on this machine; otherwise files that
    are missing here are not checked.
    """
    paths = [Path(path) for path in given["config"] or ()]
    if not here and any(not path.is_file() for path in paths):
        return
    shorthands = {name: given[name] for name in SHORTHANDS}
    recipe = None if given["recipe"] is None else Path(given["recipe"])
    options = requested(recipe, given["backend"], paths, given["set_"], shorthands)
    name, layers = options.backend or "auto", options.layers
    if name == "auto":  # its options are not known
        driver, layers = find_driver("cpu"), without_backend(layers)
    else:
        driver = find_driver(name)
    plan = planned(driver, layers)
    if name != "auto" and not gpus:
        refuse_unpromised(driver, plan, ranks)
    if options.recipe is None or (not here and not options.recipe.is_file()):
        return  # the small GPT, the recipe of the resumed run, or one in an image
    resolve(load_recipe_file(options.recipe), driver, layers)

"""Checks the parts of a recipe before anything is started."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..data.indexed import length_of
from ..data.user_frames import last_line
from ..kernel.errors import DataError, RecipeError, RecipeFailed, SettingError
from ..kernel.optional import ChecksModels
from ..kernel.plan import Plan
from ..kernel.recipe import Recipe
from .settings import ScheduleSettings, Settings
from .signals import StoppedBeforeStart

__all__ = [
    "ChecksModels",
    "check_model",
    "check_observers",
    "check_optimization",
    "check_recipe",
    "deciding_metrics",
    "in_words",
    "output_is_gone",
    "report_exits",
    "without_memory",
]

_FUNCTIONS = (
    *("collate", "count_items", "optimizer", "schedule", "measure", "summarise", "step"),
    "after_update",
)


def check_recipe(recipe: Any) -> None:
    """Raises `RecipeError`, naming the part, or `DataError`. Calls none of them."""
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"the recipe is of type {_name(recipe)}; it must be a Recipe")
    for part in ("model", "loss", "train_data"):
        if getattr(recipe, part) is None:
            raise RecipeError(f"the recipe has no {part}; training needs one")
    for part, built in (
        ("model", nn.Module),
        ("optimizer", torch.optim.Optimizer),
        ("schedule", LRScheduler),
    ):
        value = getattr(recipe, part)
        if isinstance(value, built):
            raise RecipeError(
                f"recipe.{part} is a {_name(value)}, already built; give a function that builds "
                "it: the driver decides when and where"
            )
    for part in ("model", "loss", *_FUNCTIONS):
        value = getattr(recipe, part)
        if value is not None and not callable(value):
            raise RecipeError(f"recipe.{part} is of type {_name(value)}; it must be a function")
    for part in ("loss", "measure"):
        _check_signature(part, getattr(recipe, part))
    _check_data(recipe)
    flops = recipe.flops_per_item
    if flops is not None and not _is_finite(flops):
        raise RecipeError(f"recipe.flops_per_item is {flops!r:.100}; it must be a number")


def check_observers(observers: Sequence[Any], name: str) -> None:
    """Raises `RecipeError` for an observer that cannot be called with an event."""
    for observer in observers:
        if isinstance(observer, type):
            kind = observer.__name__
            raise RecipeError(f"{name} has the class {kind}; give an object of it: {kind}(...)")
        if not callable(observer):
            raise RecipeError(
                f"{name} has {observer!r:.100}; each must be a function that takes an event"
            )


def check_optimization(recipe: Recipe, settings: Settings) -> None:
    """Raises `SettingError` for an optimizer or a schedule that is set twice or is invalid, and for
    groups that do not match the model's parameters. The model is built on the meta device for that
    check; if that fails, the driver makes the check later."""
    if recipe.optimizer is not None and settings.optimizer.groups:
        raise SettingError(
            "optimizer.groups are set, and the recipe builds its own optimizer; take one"
        )
    for setting, metric in deciding_metrics(settings).items():
        if not recipe.eval_data:
            raise SettingError(
                f"{setting} is {metric!r}, and the recipe has no eval_data to measure"
            )
        if settings.evaluate.every is None and settings.evaluate.every_epochs is None:
            raise SettingError(
                f"{setting} is {metric!r}, and nothing is measured before the end: set "
                "evaluate.every or evaluate.every_epochs"
            )
    if recipe.schedule is not None and settings.schedule != ScheduleSettings():
        raise SettingError("schedule is set, and the recipe has a schedule of its own; take one")
    if recipe.optimizer is not None:
        return
    settings.optimizer.check()
    if settings.optimizer.groups and (model := without_memory(recipe)) is not None:
        settings.optimizer.build(list(model.named_parameters()))


def deciding_metrics(settings: Settings) -> dict[str, str]:
    """Return the metrics that decide during a run, by the names of their settings."""
    named = {"stop.metric": settings.stop.metric, "schedule.metric": settings.schedule.metric}
    return {setting: metric for setting, metric in named.items() if metric is not None}


def check_model(driver: Any, recipe: Recipe, plan: Plan) -> None:
    """Have a driver that `ChecksModels` check the model, which is built on the meta device for it.
    A model that cannot be built there is checked when the driver prepares it."""
    if isinstance(driver, ChecksModels) and (model := without_memory(recipe)) is not None:
        driver.check_model(model, recipe, plan)


def without_memory(recipe: Recipe) -> nn.Module | None:
    """Build the model on the meta device; None if that fails."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return recipe.model()
    except Exception:  # a model that reads its values while it is built
        return None


def _check_signature(part: str, function: Any) -> None:
    """Raises `RecipeError` for a function that does not accept a module and a batch."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # no such function, or a builtin without signature
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise RecipeError(
            f"recipe.{part} takes {signature}, and is called as {part}(module, batch): {error}"
        ) from None


def _check_data(recipe: Recipe) -> None:
    data: Any = recipe.eval_data
    if not isinstance(data, Mapping) or not all(isinstance(name, str) for name in data):
        raise RecipeError(
            f"recipe.eval_data is of type {_name(data)}; it must name its data sets, as in "
            'eval_data={"held_out": data}'
        )
    if length_of(recipe.train_data) == 0:
        raise DataError(
            f"train_data holds no samples: it is a {_name(recipe.train_data)} of length 0"
        )
    for name, held in data.items():
        if length_of(held) == 0:
            raise DataError(f"evaluation data set {name!r} is empty; leave it out or fill it")
    lengths = recipe.lengths
    if lengths is not None and not (
        hasattr(lengths, "__len__") and hasattr(lengths, "__getitem__")
    ):
        raise RecipeError(
            f"recipe.lengths is of type {_name(lengths)}; it must hold a number for each sample"
        )


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _name(value: object) -> str:
    return type(value).__name__


@contextmanager
def report_exits() -> Iterator[None]:
    """Raise `RecipeFailed` if user code in the block calls `sys.exit`, which must not pass for the
    normal end of the run."""
    try:
        yield
    except StoppedBeforeStart:
        raise
    except SystemExit as error:
        if output_is_gone(error):
            raise
        raise RecipeFailed(in_words(error)) from error


def output_is_gone(error: BaseException) -> bool:
    """True if a process ends since the reader of its output has gone, as with `| head`."""
    return isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)


def in_words(error: BaseException) -> str:
    """Return the error's type and message; of a call of `sys.exit`, what it means."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) was called, which is not how a run ends: raise an error"
    return last_line(error)

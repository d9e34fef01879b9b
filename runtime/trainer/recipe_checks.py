"""Checks the parts of a recipe before anything is started."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..data.indexed import length_of
from ..kernel.errors import DataError, RecipeError, RecipeFailed, SettingError
from ..kernel.plan import Plan
from ..kernel.recipe import Recipe
from .settings import ScheduleSettings, Settings

__all__ = [
    "ChecksModels",
    "check_model",
    "check_optimization",
    "check_recipe",
    "exit_called",
    "exits_told",
]

_FUNCTIONS = ("collate", "count_items", "optimizer", "schedule", "measure", "summarise", "step")


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
    _check_data(recipe)
    flops = recipe.flops_per_item
    if flops is not None and not _is_finite(flops):
        raise RecipeError(f"recipe.flops_per_item is {flops!r:.100}; it must be a number")


def check_optimization(recipe: Recipe, settings: Settings) -> None:
    """Raises `SettingError` for an optimizer or a schedule that is said twice or cannot be, and for
    groups of parameters that are not those of the model, which is built on the meta device for
    them. Where that cannot be done, the driver finds it out."""
    if recipe.optimizer is not None and settings.optimizer.groups:
        raise SettingError(
            "optimizer.groups are set, and the recipe builds its own optimizer; take one"
        )
    if recipe.schedule is not None and settings.schedule != ScheduleSettings():
        raise SettingError("schedule is set, and the recipe has a schedule of its own; take one")
    if recipe.optimizer is not None:
        return
    settings.optimizer.check()
    if settings.optimizer.groups and (model := _without_memory(recipe)) is not None:
        settings.optimizer.build(list(model.named_parameters()))


@runtime_checkable
class ChecksModels(Protocol):
    """A driver that can tell of a model, before its ranks meet, that it cannot train it."""

    def check_model(self, model: nn.Module, recipe: Recipe, plan: Plan) -> None:
        """`model` is the recipe's, on the meta device. Changes nothing; raises `RecipeError`, or
        `CapabilityRefused` for what it does with no model."""
        ...


def check_model(driver: Any, recipe: Recipe, plan: Plan) -> None:
    """Have such a driver check the model, which is built on the meta device for it. Where that
    cannot be done, it finds out when it prepares it."""
    if isinstance(driver, ChecksModels) and (model := _without_memory(recipe)) is not None:
        driver.check_model(model, recipe, plan)


def _without_memory(recipe: Recipe) -> nn.Module | None:
    """The model, on the meta device; None where it cannot be built so."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return recipe.model()
    except Exception:  # a model that looks at its numbers while it is made
        return None


def _check_data(recipe: Recipe) -> None:
    data: Any = recipe.eval_data
    if not isinstance(data, Mapping) or not all(isinstance(name, str) for name in data):
        raise RecipeError(
            f"recipe.eval_data is of type {_name(data)}; it must name its data sets, as in "
            'eval_data={"held_out": data}'
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
def exits_told() -> Iterator[None]:
    """Around code of the user's: `sys.exit` there must not pass for the end of the run. Raises
    `RecipeFailed`."""
    try:
        yield
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):
            raise  # nobody reads what is printed, as with `| head`
        raise RecipeFailed(exit_called(error)) from error


def exit_called(error: SystemExit) -> str:
    """What is said of it."""
    return f"sys.exit({error.code!r}) was called, which is not how a run ends: raise an error"

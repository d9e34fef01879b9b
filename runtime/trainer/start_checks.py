"""Checks at the start: all ranks run the same code on the same data with the same settings."""

from __future__ import annotations

import functools
import hashlib
import inspect
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from importlib import metadata
from types import CodeType
from typing import Any, TypeVar, cast

import torch

from ..data.indexed import length_of
from ..kernel import errors
from ..kernel.contract import Driver, Session
from ..kernel.errors import CollectiveFailed, DrivetrainError
from ..kernel.plan import Plan
from ..kernel.recipe import Recipe
from .setting_values import flatten
from .settings import Settings

__all__ = ["agree", "json_types", "on_rank_0", "start_conditions"]

T = TypeVar("T")


def json_types(settings: Settings) -> dict[str, Any]:
    """Return the settings by dotted key, as JSON types."""
    flat = flatten(settings)
    return {key: list(v) if isinstance(v, tuple) else v for key, v in flat.items()}


def start_conditions(
    driver: Driver, plan: Plan, recipe: Recipe, settings: Settings
) -> dict[str, Any]:
    """Return everything that must be equal on all ranks: versions, driver and its options,
    settings, recipe."""
    options = driver.options_type() if plan.options is None else plan.options
    return {
        "version of python": platform.python_version().rpartition(".")[0],
        **{f"version of {name}": version for name, version in driver.probe().versions.items()},
        "version of torch": torch.__version__,
        "version of drivetrain": _own_version(),
        "backend": driver.name,
        **{f"backend.{key}": value for key, value in flatten(options).items()},
        **json_types(settings),
        **_recipe(recipe),
    }


def on_rank_0(session: Session, act: Callable[[], T]) -> T:
    """Call `act` on rank 0, and return its result (JSON types) on all ranks. An error is raised on
    all ranks: if one rank left alone, the others would keep waiting."""
    cause: Exception | None = None
    answer: dict[str, Any] = {}
    if session.world.rank == 0:
        try:
            answer["result"] = act()
        except Exception as error:
            cause, answer["error"] = error, [type(error).__name__, str(error)]
    answer = session.exchange(answer)[0]
    if cause is not None:
        raise cause
    if "error" in answer:
        name, message = answer["error"]
        raise getattr(errors, name, DrivetrainError)(f"rank 0: {message}")
    return cast(T, answer["result"])


def agree(session: Session, conditions: Mapping[str, Any]) -> None:
    """Raises `CollectiveFailed`, with both values of each difference, unless all ranks pass the
    same conditions. Called once, before the model is built.
    """
    mine, own = {key: str(value) for key, value in conditions.items()}, session.world.rank
    for other, theirs in enumerate(session.exchange(mine)):
        shown = [
            f"{key} is {mine.get(key, 'absent')} on rank {own} "
            f"and {theirs.get(key, 'absent')} on rank {other}"
            for key in {**mine, **theirs}
            if mine.get(key) != theirs.get(key)
        ]
        if shown:
            raise CollectiveFailed(
                f"ranks {own} and {other} were not started alike: {'; '.join(shown)}. Start every "
                "rank with the same command, in the same environment, on the same files"
            )


def _own_version() -> str:
    try:
        return metadata.version("drivetrain")
    except metadata.PackageNotFoundError:
        return "not installed"


def _recipe(recipe: Recipe) -> dict[str, str]:
    """Describe each part of a recipe by its name and, for functions, a fingerprint of their
    code."""
    parts = {item.name: getattr(recipe, item.name) for item in fields(recipe)}
    found = {f"recipe.{name}": _named(part) for name, part in parts.items() if callable(part)}
    sets = {"train_data": recipe.train_data}
    sets |= {f"eval_data.{name}": data for name, data in recipe.eval_data.items()}
    for name, data in sets.items():
        length = length_of(data)
        size = "" if length is None else f" of {length} samples"
        found[f"recipe.{name}"] = _named(data if callable(data) else type(data)) + size
    return found


def _named(part: Any) -> str:
    while isinstance(part, functools.partial):
        part = part.func
    part = inspect.unwrap(part)
    if not hasattr(part, "__qualname__"):
        part = type(part)
    name = f"{part.__module__}.{part.__qualname__}"
    code = getattr(part, "__code__", None)
    if code is None:
        return name
    digest = hashlib.sha256("\n".join(_words(code)).encode()).hexdigest()
    return f"{name} ({digest[:12]})"


def _words(code: CodeType) -> Iterator[str]:
    """Yield the parts of a function's code that are equal in all processes: no file path, and sets
    in a fixed order."""
    yield code.co_code.hex()
    yield " ".join(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _words(constant)
        elif isinstance(constant, frozenset):
            yield repr(sorted(map(repr, constant)))
        else:
            yield repr(constant)

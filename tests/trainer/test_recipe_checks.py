"""Invalid recipes are refused by name before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import OptimizerSettings, Recipe, Settings
from drivetrain.kernel.errors import DataError, RecipeError, SettingError, UsageError
from drivetrain.trainer.fit import fit

DATA = torch.utils.data.TensorDataset(torch.zeros(8, 2))


def loss(module: nn.Module, batch: Any) -> torch.Tensor:
    return module(batch[0]).square().sum()  # type: ignore[no-any-return]


GOOD = Recipe(model=lambda: nn.Linear(2, 1), loss=loss, train_data=DATA)


class Sized:
    """Data whose `len` returns the given value."""

    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length  # type: ignore[no-any-return]

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": nn.Linear(2, 1)}, RecipeError, "recipe.model is a Linear, already built"),
        ({"model": 3}, RecipeError, "recipe.model is of type int"),
        ({"model": None}, RecipeError, "no model"),
        ({"loss": 3}, RecipeError, "recipe.loss is of type int"),
        ({"train_data": None}, RecipeError, "no train_data"),
        ({"collate": []}, RecipeError, "recipe.collate is of type list"),
        ({"eval_data": DATA}, RecipeError, "eval_data is of type TensorDataset"),
        ({"lengths": 3}, RecipeError, "recipe.lengths is of type int"),
        ({"flops_per_item": "many"}, RecipeError, "flops_per_item is 'many'"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(2, 1).parameters())},
            RecipeError,
            "recipe.optimizer is a SGD, already built",
        ),
        ({"optimizer": lambda named: 3}, RecipeError, "recipe.optimizer returned int"),
        ({"count_items": lambda batch: -1}, RecipeError, "count_items came to -1"),
        ({"count_items": lambda batch: float("nan")}, RecipeError, "count_items came to nan"),
        ({"train_data": Sized(-1)}, DataError, "length of Sized is invalid"),
        ({"train_data": Sized(2.5)}, DataError, "length of Sized is no whole number"),
        ({"train_data": Sized(10**30)}, DataError, "length of Sized is invalid"),
        ({"eval_data": {"a": Sized(-1)}}, DataError, "length of Sized is invalid"),
    ],
)
def test_a_part_of_a_recipe(changes: dict[str, Any], error: type[UsageError], words: str) -> None:
    wrong = dataclasses.replace(GOOD, **changes)
    with pytest.raises(error, match=words):
        fit(wrong, Settings(steps=1), backend="cpu")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: fit(nn.Linear(2, 1)), RecipeError, "must be a Recipe"),  # type: ignore[arg-type]
        (lambda: fit(GOOD, out=""), SettingError, "'' is no path"),
        (lambda: fit(GOOD, resume=""), SettingError, "'' is no path"),
        (
            lambda: fit(GOOD, Settings(optimizer=OptimizerSettings(name="Nesterov"))),
            SettingError,
            "full dotted name",
        ),
    ],
)
def test_an_argument_of_fit(
    call: Callable[[], object], error: type[UsageError], words: str
) -> None:
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_every_seed_that_is_allowed_trains(seed: int) -> None:
    assert fit(GOOD, Settings(steps=1, seed=seed), backend="cpu").step == 1

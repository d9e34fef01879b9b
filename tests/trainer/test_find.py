"""Searches for a learning rate, and for the largest microbatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Batches, OptimizerGroup, OptimizerSettings, Recipe, Settings
from drivetrain.kernel.errors import RecipeError, SettingError
from drivetrain.trainer.find import MicroBatch, find_learning_rate, find_micro_batch

SGD = Settings(global_batch=8, optimizer=OptimizerSettings(name="sgd", lr=1.0), max_grad_norm=None)
POINTS = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
DATA = [(x, x.sum(0, keepdim=True)) for x in POINTS]


def squared(module: nn.Module, batch: Any) -> torch.Tensor:
    return (module(batch[0]) - batch[1]).square().sum()


RECIPE = Recipe(lambda: nn.Linear(4, 1), squared, DATA)


def test_a_rate_below_the_one_that_diverges_is_suggested() -> None:
    """Train by SGD on a quadratic. It diverges above 2 divided by the largest eigenvalue of the
    Hessian. That eigenvalue is about 2 for the mean of squares of standard normal inputs, so the
    limit is about 1.
    """
    found = find_learning_rate(RECIPE, SGD, backend="cpu")
    assert len(found.rates) == len(found.losses) < 100
    assert found.rates[0] == pytest.approx(1e-7)
    assert found.rates[10] == pytest.approx(1e-7 * 10 ** (8 * 10 / 99))
    assert found.losses[-1] > 4 * min(found.losses)
    assert found.suggestion is not None
    assert 0.003 < found.suggestion < 0.3


def test_nothing_is_suggested_where_nothing_is_learnt() -> None:
    found = find_learning_rate(RECIPE, SGD, backend="cpu", low=1e-12, high=1e-10, steps=30)
    assert len(found.rates) == 30
    assert found.suggestion is None


def test_groups_keep_their_share() -> None:
    seen: list[float] = []

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(self.param_groups[0]["lr"])
            return super().step(closure)

    globals()["Noting"] = Noting
    groups = (OptimizerGroup("bias", lr=0.5), OptimizerGroup())
    optimizer = OptimizerSettings(name=f"{__name__}.Noting", lr=1.0, groups=groups)
    find_learning_rate(
        RECIPE, dataclasses.replace(SGD, optimizer=optimizer), backend="cpu", high=1e-3, steps=20
    )
    assert [a / b for a, b in zip(seen[1::2], seen[::2], strict=True)] == pytest.approx([2.0] * 20)


@pytest.mark.parametrize(
    ("changes", "how", "error", "words"),
    [
        ({}, {"low": 1.0, "high": 0.1}, SettingError, "0 < low < high"),
        ({}, {"steps": 5}, SettingError, "at least 20 steps"),
        ({"optimizer": lambda named: None}, {}, RecipeError, "an optimizer of its own"),
        ({"schedule": lambda applied: 1.0}, {}, RecipeError, "a schedule of its own"),
    ],
)
def test_what_cannot_be_searched(
    changes: dict[str, Any], how: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        find_learning_rate(dataclasses.replace(RECIPE, **changes), SGD, backend="cpu", **how)


def sizes(found: Sequence[MicroBatch]) -> list[tuple[int, bool]]:
    return [(each.size, each.samples_per_second is not None) for each in found]


def test_the_largest_microbatch() -> None:
    def hungry(module: nn.Module, batch: Any) -> torch.Tensor:
        if len(batch[0]) > 5:
            raise torch.OutOfMemoryError("no memory")
        return squared(module, batch)

    small = find_micro_batch(dataclasses.replace(RECIPE, loss=hungry), SGD, backend="cpu")
    assert sizes([*small]) == [(1, True), (2, True), (4, True), (8, False)]
    whole = find_micro_batch(RECIPE, SGD, backend="cpu", most=50)
    assert sizes([*whole]) == [(1, True), (2, True), (4, True), (8, True), (16, True), (32, True)]


def test_the_size_of_ready_batches_is_their_loaders() -> None:
    ready = dataclasses.replace(RECIPE, train_data=Batches([DATA]))
    with pytest.raises(SettingError, match="the training data are Batches"):
        next(find_micro_batch(ready, SGD, backend="cpu"))

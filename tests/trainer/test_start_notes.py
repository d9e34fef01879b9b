"""A run begins with notes on settings that are allowed, but seldom intended."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import DataSettings, Recipe, ScheduleSettings, Settings
from drivetrain.kernel.events import Warned
from drivetrain.trainer.fit import fit

DATA = torch.utils.data.TensorDataset(torch.arange(20.0)[:, None])
GROWING = DataSettings(batch_warmup=5, batch_warmup_from=1)
SHORT = Settings(steps=4, global_batch=4)
RECIPE = Recipe(
    lambda: nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)),
    lambda module, batch: module(batch[0] / 20).square().sum(),
    DATA,
)


def notes_of(recipe: Recipe, settings: Settings) -> list[str]:
    seen: list[Any] = []
    fit(recipe, settings, backend="cpu", observers=[seen.append])
    return [event.message for event in seen if isinstance(event, Warned)]


def only(*names: str) -> Recipe:
    """Return a recipe whose optimizer trains the named parameters alone."""
    return dataclasses.replace(
        RECIPE, optimizer=lambda named: torch.optim.SGD([p for n, p in named if n in names], lr=0.1)
    )


@pytest.mark.parametrize(
    ("recipe", "settings", "words"),
    [
        (RECIPE, SHORT, None),
        (only("0.weight", "0.bias", "1.weight", "1.bias"), SHORT, None),
        (only("0.weight"), SHORT, "recipe.optimizer was not given 0.bias, 1.weight, 1.bias: they"),
        (RECIPE, dataclasses.replace(SHORT, global_batch=32), "train_data has 20 samples: each"),
        (RECIPE, dataclasses.replace(SHORT, schedule=ScheduleSettings(warmup=4)), "the run has 4:"),
        (RECIPE, dataclasses.replace(SHORT, schedule=ScheduleSettings(warmup=0.9)), None),
        (RECIPE, Settings(global_batch=4, schedule=ScheduleSettings(warmup=50)), "the run has 5:"),
        (RECIPE, dataclasses.replace(SHORT, data=GROWING), "the run has 4: its batches do not"),
        (RECIPE, dataclasses.replace(SHORT, steps=6, data=GROWING), None),
    ],
)
def test_notes(recipe: Recipe, settings: Settings, words: str | None) -> None:
    notes = notes_of(recipe, settings)
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0]


def test_what_is_frozen_is_meant() -> None:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
        made[0].requires_grad_(False)
        return made

    assert not notes_of(dataclasses.replace(only("1.weight", "1.bias"), model=model), SHORT)

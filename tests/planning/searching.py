"""A small search."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from drivetrain import Recipe, Settings
from drivetrain.planning.devices import find_device
from drivetrain.planning.search import LeftOut, Search, Way
from drivetrain.registry import find_driver

WIDTH = 64
SETTINGS = Settings(steps=4, global_batch=64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


def summed(module: nn.Module, batch: tuple[Tensor]) -> Tensor:
    result: Tensor = module(batch[0]).square().flatten(1).mean(1).sum()
    return result


RECIPE = Recipe(
    lambda: nn.Sequential(*(Block() for _ in range(4))),
    summed,
    TensorDataset(torch.zeros(64, 50, WIDTH)),
)


def searching(memory: float, given: tuple[str, ...] = (), recipe: Recipe = RECIPE) -> Search:
    return Search(recipe, 2, replace(find_device("h100"), memory_bytes=memory), given)


def ways(search: Search, backend: str, settings: Settings = SETTINGS, **options: Any) -> list[Way]:
    found = search.ways(find_driver(backend), settings, options)
    assert not isinstance(found, LeftOut), found
    return found

"""A small regression with dropout, for tests of `fit`."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from drivetrain import Recipe
from drivetrain.checkpoint import CheckpointReader
from drivetrain.data.indexed import Loader
from drivetrain.data.open_dataset import once
from drivetrain.data.order import sequential
from drivetrain.kernel.batches import Group


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """`num_samples` rows of four numbers, each with its sum as the target. `poison` replaces the
    target of some rows.
    """

    def __init__(
        self, num_samples: int = 50, poison: dict[int, float] | None = None, noise: float = 0.0
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(num_samples, 4, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True)
        self.noise = noise
        for index, value in (poison or {}).items():
            self.targets[index] = value

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = self.inputs[index]
        if self.noise:
            inputs = inputs + self.noise * torch.randn_like(inputs)
        return inputs, self.targets[index]


def build(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


def squared_error(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return (module(inputs) - targets).square().sum()


def recipe(
    num_samples: int = 50,
    *,
    dropout: float = 0.0,
    poison: dict[int, float] | None = None,
    noise: float = 0.0,
    num_eval: int = 13,
) -> Recipe:
    return Recipe(
        model=lambda: build(dropout),
        loss=squared_error,
        train_data=Pairs(num_samples, poison, noise),
        eval_data={"held_out": Pairs(num_eval)} if num_eval else {},
    )


def everything(checkpoint: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, random state included."""
    reader = CheckpointReader(checkpoint)
    return {
        f"{kind}/{name}": reader.read(kind, name)
        for kind in ("weights", "optimizer", "state")
        for name in reader.names(kind)
    }


def eval_groups(
    dataset: Any, *, micro_batch: int, num_readers: int = 1, **options: Any
) -> Generator[Group, None, None]:
    """Yield every sample once, in order, in groups with at most `micro_batch` samples
    for a reader.
    """
    sizes = {"global_batch": micro_batch * num_readers, "micro_batch": micro_batch}
    return once(Loader(dataset, num_readers=num_readers, order=sequential, **sizes, **options))

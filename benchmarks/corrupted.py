"""A recipe for `drivetrain train` whose numbers are corrupted where `CORRUPTIONS` plants it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain import Parallel, Recipe

__all__ = ["BITS", "PLANTED", "Plant", "recipe"]

PLANTED = "CORRUPTIONS"
"""Environment variable with the plants, separated by spaces."""
BITS = {
    "one low bit": (1, 1),
    "one exponent bit": (1 << 26, 1),
    "several bits": (1 << 21 | 1 << 3, 1),
    "a stripe": (1, 16),
}
"""Flipped bits of a float32, and the number of elements in which they are flipped. No kind makes
infinities of numbers of usual sizes, which would end the run."""
LOWEST_OF_GRADIENT = 1 << 12
"""Replaces the lowest bit in gradients: the update multiplies them by 0.1 and adds the moment, and
rounds lower bits away, so that nothing of the run would be wrong."""
SHAPE, NUM_ROWS = (12, 8), 2000


class Plant(NamedTuple):
    """A corruption of `target` in `step`."""

    target: str
    """`weight`, `gradient`, `moment` or `sample`."""
    step: int
    """The step; of a sample its place in the data."""
    rank: str
    """The rank, or `all`."""
    kind: str
    """Key of `BITS`."""

    def __str__(self) -> str:
        number = [*BITS].index(self.kind)
        return f"{self.target}:{self.step}:{self.rank}:{number}"

    @staticmethod
    def parse(text: str) -> Plant:
        target, step, rank, number = text.split(":")
        return Plant(target, int(step), rank, [*BITS][int(number)])

    def flip(self, tensor: Tensor) -> None:
        """Flip the bits in the first elements of the part that this rank holds."""
        mask, count = BITS[self.kind]
        if self.target == "gradient" and mask == 1:
            mask = LOWEST_OF_GRADIENT
        local: Tensor = getattr(tensor, "to_local", lambda: tensor)()
        words = local.detach().view(-1).view(torch.int32)[:count]
        words ^= mask


PLANTS = [Plant.parse(text) for text in os.environ.get(PLANTED, "").split()]


def planted(target: str, step: int) -> list[Plant]:
    mine = ("all", os.environ.get("RANK", "0"))
    return [p for p in PLANTS if (p.target, p.step) == (target, step) and p.rank in mine]


class Corrupted(torch.optim.AdamW):
    """AdamW with corruptions in the first weight."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        # drivers may call it for some of the tensors at a time, or for a flat one of all
        chosen = [
            each
            for each in self.param_groups[0]["params"]
            if tuple(each.shape) == SHAPE or (each.dim() == 1 and each.numel() > 40)
        ]
        numbers = [int(self.state[each].get("step", 0)) + 1 for each in chosen]
        for each, number in zip(chosen, numbers, strict=True):
            for plant in planted("gradient", number):
                plant.flip(each.grad)
        super().step(closure)
        for each, number in zip(chosen, numbers, strict=True):
            for plant in planted("moment", number):
                plant.flip(self.state[each]["exp_avg"])
            for plant in planted("weight", number):
                plant.flip(each)


class Rows(torch.utils.data.Dataset[Tensor]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randn(NUM_ROWS, SHAPE[1], generator=generator)

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> Tensor:
        row = self.rows[index].clone()
        for plant in planted("sample", index):
            plant.flip(row)
        return row


def loss(module: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    return (module(batch) - batch).square().sum()


def optimizer(named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return Corrupted([each for _, each in named], lr=0.01)


def model() -> nn.Module:
    out, inputs = SHAPE
    return nn.Sequential(nn.Dropout(0.1), nn.Linear(inputs, out), nn.Tanh(), nn.Linear(out, inputs))


recipe = Recipe(
    model=model,
    loss=loss,
    train_data=Rows(),
    optimizer=optimizer,
    parallel=Parallel(tensor={"1": "column", "3": "row"}),
)

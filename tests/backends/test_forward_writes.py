"""Weights that a forward or a loss writes to: each write is kept, as in one process, or refused by
name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from environments import python_of_all
from few_cases import only_quick
from small_networks import SETTINGS, Blocks, copied
from test_attached import recipe
from torch import Tensor, nn

from drivetrain.conformance.bench import Bench
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import RecipeError


class Momentum(Blocks):
    """A network with a frozen layer that each forward moves towards the last layer, as momentum
    encoders do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for slow, fast in zip(self.teacher.parameters(), self.last.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        return super().forward(x) + self.teacher(x)


class InPlace(Momentum):
    @torch.no_grad()
    def _follow(self) -> None:
        self.teacher.weight.lerp_(self.last.weight, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        self._follow()
        return Blocks.forward(self, x) + self.teacher(x)


class Renormalised(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(3, 4, max_norm=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.rows((x[:, 0] > 0).long())


def clipping(module: nn.Module, batch: Tensor) -> Tensor:
    """Clip the weights in the loss, as WGANs do with their critic."""
    for parameter in module.parameters():
        parameter.data.clamp_(-0.2, 0.2)
    loss: Tensor = (module(batch) - batch.roll(1, 1)).square().sum()
    return loss


def written(bench: Bench, *, names: Sequence[str]) -> dict[str, Any]:
    """A job: return, for each name, the trained weights, or the message that refuses the write."""
    reported: dict[str, Any] = {}
    for name in names:
        kept = recipe(Blocks if name == "clipping" else globals()[name])
        if name == "clipping":
            kept = dataclasses.replace(kept, loss=clipping)
        try:
            settings = {**SETTINGS, "precision": PRECISIONS.get(bench.backend, "fp32")}
            reported[name] = bench.fit(kept, settings, finish=copied).finish
        except RecipeError as error:
            reported[name] = str(error)
    return reported


class OfABlock(Blocks):
    """A network in which a layer of the root follows one of a block, before the block runs."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(4, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.mul_(0.99).add_(self.blocks[0].up.weight, alpha=0.01)
        return super().forward(x) + self.teacher(x)[:, :4]


class Copied(OfABlock):
    def forward(self, x: Tensor) -> Tensor:
        self.teacher.weight.data.copy_(self.blocks[0].up.weight.data)
        return Blocks.forward(self, x) + self.teacher(x)[:, :4]


class Filled(Blocks):
    """A network that writes a whole tensor into each block."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for block in self.blocks:
                block.down.weight.copy_(torch.eye(4, 8))
        return super().forward(x)


class ClampsInside(Blocks):
    """A network whose layers clamp their weights before they compute."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.blocks[0].up, self.last):
            part.register_forward_pre_hook(_clamp)


def _clamp(part: Any, given: Any) -> None:
    part.weight.data.clamp_(-0.2, 0.2)


REFUSED = {
    "Momentum": ["teacher.weight"],
    "InPlace": ["teacher.weight"],
    "OfABlock": ["teacher.weight"],
    "Copied": ["teacher.weight"],
    "Filled": ["blocks.0.down.weight"],
    "ClampsInside": ["blocks.0.up.weight", "last.weight"],
    "Renormalised": ["rows is an embedding with max_norm"],
    "clipping": ["first.weight", "blocks.1.up.weight"],
}
"""Names of models, and the beginnings of the refusals; each rank of a pipeline names its own."""
KEPT = {
    "ddp": ("clipping",),
    "fsdp": ("clipping",),
    "shard": ("clipping",),
    "tensor": ("clipping",),
}
"""By driver: writes between forwards that last."""
DRIVERS = {
    "ddp": Subject("ddp", 2),
    "fsdp": Subject("fsdp", 2),
    "shard": Subject("mesh", 2),
    "tensor": Subject("mesh", 2, {"tensor": 2}),
    "pipeline": Subject("mesh", 2, {"pipeline": 2}),
    "zero-2": Subject("deepspeed", 2, {"stage": 2}, python=python_of_all()),
    "zero-3": Subject("deepspeed", 2, {"stage": 3}, python=python_of_all()),
    "ipex": Subject("ipex", 1, {"weights_prepack": False}, python=python_of_all()),
}
REFUSED_OTHERWISE = {("ipex", "Renormalised"): ["rows.weight: these weights"]}
"""By driver and model: in one process all rows are written alike, but masters do not have them."""
PRECISIONS = {"ipex": "bf16"}
"""By driver: the precision in which weights are copies of masters, if only one has them."""


@pytest.mark.parametrize("driver", only_quick(DRIVERS, ("ddp", "fsdp")))
def test_weights_that_a_forward_writes_are_kept_or_refused(
    driver: str, request: pytest.FixtureRequest
) -> None:
    """Require that writes between forwards last where drivers keep them, as in one process, and
    that all other writes are refused.
    """
    subject = DRIVERS[driver]
    if subject.python:
        request.getfixturevalue("environment_of_all")
    stays = KEPT.get(driver, ())
    refused = [name for name in REFUSED if name not in stays]
    if driver == "ddp":  # writes of each forward last there
        refused = ["Renormalised"]
    if driver == "pipeline":  # of others one rank has the weights, refuses, and ends the rest
        refused = ["Momentum", "InPlace", "Renormalised", "clipping"]
    (alone,) = Subject("cpu").run(written, names=stays)
    for reported in subject.run(written, names=[*stays, *refused]):
        for name in stays:
            for key, expected in alone[name].items():
                assert torch.allclose(reported[name][key], expected, atol=1e-6), key
        for name in refused:
            message = reported[name]
            assert isinstance(message, str), f"{name} was not refused"
            begins = REFUSED_OTHERWISE.get((driver, name), REFUSED[name])
            assert message.startswith(tuple(begins)), message
            assert "max_norm" in message or "Recipe.after_update" in message

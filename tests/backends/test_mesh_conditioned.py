"""Pipelines of models whose blocks all receive a second input: it is made by frozen weights, by
trained weights, or kept for the loss.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.conformance.bench import Bench
from drivetrain.conformance.harness import WorkerFailure
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import RecipeError
from drivetrain.kernel.recipe import Recipe

WIDTH = 6
X = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """A block with a gate that depends on the condition, and is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.layer = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.z: Any = None
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        self.z = x.square().sum()
        return x + self.gate(condition) * torch.tanh(self.layer(x))


class Conditioned(nn.Module):
    """Three blocks that all receive the same condition, made from the labels."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.pe = nn.Parameter(torch.randn(WIDTH))
        self.labels = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.kind = kind
        if kind != "detached":
            self.labels.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        condition = self.labels((x[:, 0] > 0).long())
        x = x + self.pe
        for block in self.blocks:
            x = block(x, condition.detach())
        found: Tensor = self.head(x)
        return found


def loss(module: Any, x: Tensor) -> Tensor:
    found = (module(x) - x.sum(1, keepdim=True)).square().sum()
    if module.kind == "kept":
        found = found + 1e-3 * module.blocks[0].z
    return found


def train(bench: Bench, *, kind: str, ends: bool = False) -> dict[str, Any]:
    """A job: return the final weights and the log messages."""
    reported: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: reported.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("drivetrain").addHandler(handler)
    settings = {
        "steps": 6,
        "global_batch": 4,
        "micro_batch": 2,
        "data.shuffle": False,
        "schedule.name": "constant",
        "optimizer.name": "torch.optim.SGD",
        "optimizer.lr": 0.05,
    }
    recipe = Recipe(model=lambda: Conditioned(kind), loss=loss, train_data=list(X))
    try:
        weights = bench.fit(
            recipe,
            settings,
            finish=lambda module: {n: p.detach().clone() for n, p in module.named_parameters()},
        ).finish
    except RecipeError:
        if not ends:
            raise
        traceback.print_exc()  # as a run, whose ranks end with the first that fails
        sys.stderr.flush()
        os._exit(1)
    finally:
        logging.getLogger("drivetrain").removeHandler(handler)
    return {"weights": weights, "reported": reported}


def test_stages_have_the_frozen_weights_that_condition_their_blocks() -> None:
    (alone,) = Subject("cpu").run(train, kind="frozen")
    for rank in Subject("mesh", 2, {"pipeline": 2}).run(train, kind="frozen"):
        for name, expected in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], expected, rtol=1e-5, atol=1e-6)
        assert not [line for line in rank["reported"] if "no gradient" in line]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("detached", "with backend.pipeline=2 the loss of a batch is"),
        ("kept", "recipe.loss failed after the model's forward (TypeError"),
    ],
)
def test_what_other_stages_have_is_refused(kind: str, message: str) -> None:
    """Require refusals of trained weights that are used without a gradient, and of values that
    blocks keep for the loss.
    """
    with pytest.raises(WorkerFailure, match=rf"RecipeError: {re.escape(message)}"):
        Subject("mesh", 2, {"pipeline": 2}).run(train, alone=True, kind=kind, ends=True)

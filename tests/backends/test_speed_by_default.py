"""Options that decision 17 turns on are on, and options that it keeps off for safety are off."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import EvaluateSettings, OptimizerSettings, Recipe, Settings
from drivetrain.backends.ddp import DdpOptions
from drivetrain.kernel.contract import Engine
from drivetrain.registry import usable_driver
from drivetrain.trainer.fit import fit

OPTIONS = {"cpu": None, "ddp": DdpOptions(device="cpu")}


def squared(module: nn.Module, batch: Tensor) -> Tensor:
    total: Tensor = module(batch).square().sum()
    return total


@pytest.fixture(params=OPTIONS)
def engine(request: Any) -> Any:
    recipe = Recipe(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)),
        squared,
        optimizer=OptimizerSettings().build,
    )
    plan = Settings().plan(OPTIONS[request.param])
    with usable_driver(request.param).open(plan) as session:
        yield session.prepare(recipe)


def gradients(engine: Engine) -> list[Tensor | None]:
    return [parameter.grad for parameter in engine.module.parameters()]


def train(engine: Engine) -> None:
    with engine.microbatch(last=True):
        engine.backward(squared(engine.module, torch.ones(2, 4)), torch.ones(()))


def test_adamw_is_fused(engine: Engine) -> None:
    assert all(group["fused"] for group in engine.param_groups)


@pytest.mark.parametrize("backend", OPTIONS)
def test_no_garbage_is_looked_for_while_the_optimizer_is_made(backend: str) -> None:
    collecting = []

    def optimizer(named: Any) -> torch.optim.Optimizer:
        collecting.append(gc.isenabled())
        return OptimizerSettings().build(named)

    recipe = Recipe(lambda: nn.Linear(4, 1), squared, optimizer=optimizer)
    with usable_driver(backend).open(Settings().plan(OPTIONS[backend])) as session:
        session.prepare(recipe)
    assert (collecting, gc.isenabled()) == ([False], True)


def test_an_update_lets_go_of_the_gradients(engine: Engine) -> None:
    train(engine)
    assert all(grad is not None for grad in gradients(engine))
    engine.update()
    assert gradients(engine) == [None] * 4


@pytest.mark.parametrize("engine", ["ddp"], indirect=True)
def test_gradients_are_views_of_ddp_s_buckets(engine: Engine) -> None:
    train(engine)
    places = {grad.untyped_storage().data_ptr() for grad in gradients(engine) if grad is not None}
    assert len(places) == 1


class Remembers(nn.Module):
    """A module that makes a table when it is first needed, as rotary embeddings often do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.table: Tensor | None = None

    def forward(self, batch: Tensor) -> Tensor:
        if self.table is None and not self.training:
            self.table = 2 * torch.ones(1)
        if self.table is None:
            scaled: Tensor = self.layer(batch)
            return scaled
        return self.layer(batch) * self.table


def test_what_a_model_makes_while_it_is_evaluated_can_be_trained_with() -> None:
    data = torch.ones(8, 1)
    recipe = Recipe(Remembers, squared, train_data=data, eval_data={"held_out": data})
    settings = Settings(steps=3, global_batch=4, evaluate=EvaluateSettings(every=1))
    assert fit(recipe, settings, backend="cpu").step == 3

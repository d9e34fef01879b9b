"""Layers that ranks use differently in one step of ZeRO: in another order, or on one rank alone;
and parameters in a dtype that ZeRO would store as float32.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import pack_padded_sequence

from drivetrain.backends.deepspeed.driver import driver
from drivetrain.backends.deepspeed.options import DeepspeedOptions
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.harness import WorkerFailure
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import CapabilityRefused
from drivetrain.kernel.plan import Plan
from drivetrain.kernel.recipe import Recipe
from drivetrain.trainer.settings import PRECISIONS

SETTINGS = {
    "steps": 4,
    "global_batch": 8,
    "data.shuffle": False,
    "schedule.name": "constant",
    "optimizer.name": "torch.optim.SGD",
    "optimizer.lr": 0.05,
}
LENGTHS = [3, 3, 3, 3, 1, 3, 2, 3]
"""Lengths of a step's sequences. On the first of two ranks they are all equal."""


class Reads(nn.Module):
    """A bidirectional LSTM on packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (last, _) = self.lstm(packed)
        found: Tensor = self.head(torch.cat([last[0], last[1]], -1))
        return found


def packed(bench: Bench) -> dict[str, Any]:
    """A job: return the orders in which gradients came, and the final weights."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4 * len(LENGTHS), 3, 4, generator=generator)
    orders, came = set(), list[str]()

    def model() -> nn.Module:
        made = Reads()
        for name, parameter in made.named_parameters():
            parameter.register_hook(lambda _, name=name: came.append(name))  # type: ignore[no-untyped-call]
        return made

    def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        orders.add(tuple(came))
        came.clear()
        return module(batch["x"], batch["length"]).square().sum()

    data = [{"x": rows, "length": LENGTHS[i % len(LENGTHS)]} for i, rows in enumerate(x)]
    kept = bench.fit(
        Recipe(model=model, loss=loss, train_data=data),
        SETTINGS,
        finish=lambda module: {n: p.detach().clone() for n, p in module.named_parameters()},
    ).finish
    return {"orders": [list(order) for order in orders if order], "weights": kept}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
def test_gradients_of_one_layer_may_come_in_another_order_on_each_rank(stage: int) -> None:
    (alone,) = Subject("cpu").run(packed)
    ranks = Subject("deepspeed", 2, {"stage": stage}).run(packed)
    for rank in ranks:
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], weight, rtol=1e-5, atol=1e-6)
    if stage < 3 and torch.__version__ >= "2.15":  # else a hook of the recipe's is not called
        assert ranks[0]["orders"] != ranks[1]["orders"]


class Lonely(nn.Module):
    """A model with a spare layer that rank 1 alone uses, from its second step on: it calls the
    layer, or uses the layer's weight without a call.
    """

    def __init__(self, rank: int, called: bool) -> None:
        super().__init__()
        self.spare, self.used = nn.Linear(400, 400), nn.Linear(400, 1)
        self.rank, self.called, self.steps = rank, called, 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        if self.rank == 1 and self.steps > 1:
            x = self.spare(x) if self.called else x + linear(x, self.spare.weight)
        found: Tensor = self.used(x)
        return found


def lonely(bench: Bench, *, called: bool) -> None:
    """A job: train, and end the process on an error, as a run does."""
    try:
        bench.fit(
            Recipe(
                model=lambda: Lonely(int(os.environ["RANK"]), called),
                loss=lambda module, x: module(x).square().sum(),
                train_data=[torch.ones(400)] * 32,
            ),
            {**SETTINGS, "timeout_seconds": 20.0},
        )
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


@pytest.mark.parametrize(
    ("stage", "called"),
    [(3, False), *(pytest.param(stage, True, marks=pytest.mark.slow) for stage in (2, 3))],
)
def test_a_layer_of_one_rank_alone_is_named(stage: int, called: bool) -> None:
    with pytest.raises(WorkerFailure) as failed:
        Subject("deepspeed", 2, {"stage": stage}).run(lonely, alone=True, called=called)
    named = [line for line in str(failed.value).splitlines() if "RecipeError" in line]
    assert any("used different layers" in line and "'spare" in line for line in named), named


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_that_it_would_hold_in_float32_are_refused(stage: int) -> None:
    """Require refusals that name the parameters, before ranks meet. Frozen ones are refused, too,
    where weights are sharded.
    """

    def check(model: nn.Module, precision: str = "fp32", config: Any = None) -> None:
        options = DeepspeedOptions(stage=stage, config=config)
        plan = Plan(precision=PRECISIONS[precision], options=options)
        driver.check_model(model, Recipe(model=lambda: model, loss=lambda m, b: m(b)), plan)

    half = {"bf16": {"enabled": "auto"}}
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    with pytest.raises(CapabilityRefused, match=r"bfloat16 \(1\.weight, 1\.bias\).*set precision"):
        check(mixed)
    with pytest.raises(CapabilityRefused, match=r"bfloat16 \(1\.weight, 1\.bias\)"):
        check(mixed, "bf16")
    check(mixed, "bf16", half)
    for dtype in (torch.float64, torch.complex64):
        with pytest.raises(CapabilityRefused, match=f"parameters of {dtype} \\(weight, bias\\)"):
            check(nn.Linear(2, 2, dtype=dtype), "bf16", half)
    frozen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16().requires_grad_(False))
    empty = nn.ParameterDict({"none": nn.Parameter(torch.empty(0, 3))})
    if stage == 3:
        with pytest.raises(CapabilityRefused, match=r"1\.weight"):
            check(frozen)
        with pytest.raises(CapabilityRefused, match=r"without elements \(none\)"):
            check(empty)
    else:
        check(frozen)
        check(empty)

"""Losses that take a gradient of the model's output: a gradient penalty, forces, moved inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Parallel
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import RecipeError
from drivetrain.kernel.recipe import Recipe

ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"energy": self.outer(torch.tanh(self.inner(x)))}


def output_and_slope(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_(True)
    energy = module(x)["energy"]
    (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return energy, slope


def penalty(module: nn.Module, x: Tensor) -> Tensor:
    energy, slope = output_and_slope(module, x)
    return (energy - x[:, :1]).square().sum() + (slope.norm(dim=1) - 1).square().sum()


def forces(module: nn.Module, x: Tensor) -> Tensor:
    """The last bias has no part in the loss."""
    return (output_and_slope(module, x)[1] - x.cos()).square().sum()


def forces_and_output(module: nn.Module, x: Tensor) -> Tensor:
    energy, slope = output_and_slope(module, x)
    return (slope - x.cos()).square().sum() + 0.0 * energy.sum()


def adversarial(module: nn.Module, x: Tensor) -> Tensor:
    """A first derivative alone, which the loss takes for a number."""
    moved = x.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(module(moved)["energy"].square().sum(), moved)
    loss: Tensor = (module(x + 0.1 * slope.sign())["energy"] - x[:, :1]).square().sum()
    return loss


SECOND = (penalty, forces, forces_and_output)
LOSSES = {each.__name__: each for each in (*SECOND, adversarial)}


def forces_measured(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return {"off": forces(module, x)}


def trained(
    bench: Bench, *, loss: str, measured: bool = False, micro_batch: int | None = None
) -> dict[str, Tensor] | str:
    """A job: return the final weights and the last metric, or the message of the refusal."""
    recipe = Recipe(
        Energy,
        LOSSES[loss],
        ROWS,
        eval_data={"held": ROWS[:10]},
        measure=forces_measured if measured else None,
        parallel=Parallel(tensor={"inner": "column", "outer": "row"}),
    )
    settings = {
        "steps": 6,
        "global_batch": 4,
        "micro_batch": micro_batch,
        "data.shuffle": False,
        "schedule.name": "constant",
        "max_grad_norm": 0.5,
        "optimizer.lr": 0.02,
        "optimizer.weight_decay": 0.0,
        "evaluate.sanity_check": True,
    }
    try:
        run = bench.fit(recipe, settings, finish=weights)
    except RecipeError as error:
        return str(error)
    (metric,) = run.metrics["held"].values()
    return {**run.finish, "metric": torch.tensor(metric)}


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def by_hand(loss: str, measured: bool) -> dict[str, Tensor]:
    """The same in plain PyTorch."""
    module = Energy()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02, weight_decay=0.0)
    for batch in ROWS.split(4):
        (LOSSES[loss](module, batch) / 4).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    metric = (forces if measured else LOSSES[loss])(module, ROWS[:10]).detach() / 10
    return {**weights(module), "metric": metric}


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("loss", [*LOSSES])
def test_one_process_trains_and_evaluates_as_plain_torch(loss: str, measured: bool) -> None:
    (found,) = Subject("cpu").run(trained, loss=loss, measured=measured)
    torch.testing.assert_close(found, by_hand(loss, measured))


@pytest.mark.parametrize("loss", ["penalty", "forces_and_output", "adversarial"])
def test_ddp_trains_and_evaluates_as_plain_torch(loss: str) -> None:
    for found in Subject("ddp", 2).run(trained, loss=loss, micro_batch=1):
        torch.testing.assert_close(found, by_hand(loss, False))


def test_fsdp_trains_with_first_derivatives_and_deepspeed_refuses_them() -> None:
    for found in Subject("fsdp", 2).run(trained, loss="adversarial"):
        torch.testing.assert_close(found, by_hand("adversarial", False))
    for refused in Subject("deepspeed", 2, {"stage": 2}).run(trained, loss="adversarial"):
        assert "takes a gradient of the model's output by torch.autograd.grad, and" in refused


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({}, "set backend.find_unused_parameters=true"),
        ({"find_unused_parameters": True}, "add zero times the output to the loss"),
    ],
)
def test_ddp_names_what_the_loss_has_no_part_of(options: dict[str, Any], remedy: str) -> None:
    for refused in Subject("ddp", 2, options).run(trained, loss="forces"):
        assert "no gradient reached outer.bias" in refused and remedy in refused


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("fsdp", {}),
        ("mesh", {"tensor": 2}),
        ("deepspeed", {"stage": 3}),
        *(pytest.param("deepspeed", {"stage": n}, marks=pytest.mark.slow) for n in (1, 2)),
    ],
    ids=str,
)
def test_drivers_that_prepare_one_backward_refuse_them(
    backend: str, options: dict[str, Any]
) -> None:
    for refused in Subject(backend, 2, options).run(trained, loss="penalty"):
        assert "takes a gradient of the model's output" in refused
        assert f"{backend} prepares its weights for one backward" in refused

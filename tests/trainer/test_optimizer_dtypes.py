"""State of an optimizer keeps the dtype in which it was saved."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Settings, fit
from drivetrain.checkpoint import CheckpointReader
from drivetrain.trainer.settings import CheckpointSettings, ScheduleSettings
from trainer.problems import everything, recipe

SETTINGS = Settings(
    steps=6,
    global_batch=4,
    schedule=ScheduleSettings(name="constant"),
    checkpoint=CheckpointSettings(every=2),
)


class Precise(torch.optim.Optimizer):
    """Momentum in float32, or another dtype, whatever the dtype of the weights."""

    dtype = torch.float32

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                last = state.get("momentum", torch.zeros_like(parameter, dtype=self.dtype))
                state["momentum"] = 0.9 * last + parameter.grad.to(self.dtype)
                parameter.sub_(state["momentum"].to(parameter.dtype), alpha=group["lr"])


class Double(Precise):
    dtype = torch.float64


class Half(Precise):
    dtype = torch.bfloat16


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    outputs = module(inputs.to(next(module.parameters()).dtype))
    return (outputs.float() - targets).square().sum()


def run(
    out: Path, optimizer: type[torch.optim.Optimizer], weights: torch.dtype, **arguments: Any
) -> dict[str, Tensor]:
    chosen = dataclasses.replace(
        recipe(num_eval=0),
        model=lambda: nn.Linear(4, 1, dtype=weights),
        optimizer=lambda named: optimizer([p for _, p in named], lr=0.05),
        loss=loss,
    )
    settings = dataclasses.replace(SETTINGS, steps=arguments.pop("steps", 6))
    result = fit(chosen, settings, backend="cpu", out=out, progress=False, **arguments)
    assert result.checkpoint is not None
    return everything(Path(str(result.checkpoint)))


@pytest.mark.parametrize(
    ("optimizer", "weights", "name"),
    [
        (Precise, torch.bfloat16, "weight/momentum:float32"),
        (Half, torch.float32, "weight/momentum:bfloat16"),
        (Double, torch.float32, "weight/momentum:float64"),
        (Half, torch.bfloat16, "weight/momentum"),
        (torch.optim.AdamW, torch.bfloat16, "weight/exp_avg"),
        (torch.optim.NAdam, torch.bfloat16, "weight/mu_product:float32"),
    ],
)
def test_state_of_another_dtype_is_resumed(
    optimizer: type[torch.optim.Optimizer], weights: torch.dtype, name: str, tmp_path: Path
) -> None:
    whole = run(tmp_path / "whole", optimizer, weights)
    run(tmp_path / "stopped", optimizer, weights, steps=2)
    resumed = run(tmp_path / "stopped", optimizer, weights, resume="auto")
    assert f"optimizer/{name}" in whole
    assert resumed.keys() == whole.keys()
    for key, tensor in whole.items():
        assert tensor.dtype == resumed[key].dtype, key
        assert torch.equal(tensor, resumed[key]), key


def test_moments_of_wider_weights_become_those_of_narrower_ones(tmp_path: Path) -> None:
    """Resume as from a driver that keeps float32 masters, or from a checkpoint of an earlier
    version: AdamW takes moments in the dtype of the weights alone."""
    run(tmp_path / "wide", torch.optim.AdamW, torch.float32, steps=2)
    found = run(
        tmp_path / "narrow",
        torch.optim.AdamW,
        torch.bfloat16,
        resume=tmp_path / "wide",
    )
    names = [n for n in found if n.startswith("optimizer/weight/")]
    assert sorted(names) == [f"optimizer/weight/{k}" for k in ("exp_avg", "exp_avg_sq", "step")]


def test_a_name_says_the_dtype(tmp_path: Path) -> None:
    run(tmp_path / "run", Half, torch.float32, steps=2)
    reader = CheckpointReader(tmp_path / "run/checkpoints/checkpoint-000002")
    assert reader.info("optimizer", "weight/momentum:bfloat16").dtype == torch.float32

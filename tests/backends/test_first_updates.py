"""Sparse gradients, and optimizers whose first update of a weight differs from later ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.conformance.bench import Bench
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import CapabilityRefused
from drivetrain.kernel.recipe import Recipe

SETTINGS = {
    "global_batch": 4,
    "data.shuffle": False,
    "schedule.name": "constant",
    "max_grad_norm": 0.5,
    "max_grad_value": 0.1,
}


class Net(nn.Module):
    """A model with sparse or dense rows. With `late`, one layer is first used in the
    third forward.
    """

    def __init__(self, sparse: bool, late: bool) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(6, 4, sparse=sparse), nn.Linear(4, 1)
        self.late = nn.Linear(4, 1) if late else None
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += self.training
        hidden = self.rows(x)
        made: Tensor = self.head(hidden)
        return made if self.late is None or self.forwards < 3 else made + self.late(hidden)


def momentum(named: Any) -> torch.optim.Optimizer:
    """Build SGD with momentum: the first update takes the whole gradient, each later one half of
    it.
    """
    weights = [parameter for _, parameter in named]
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1)


def plain(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


def trained(
    bench: Bench,
    *,
    sparse: bool = False,
    late: bool = False,
    steps: int = 4,
    folder: str | None = None,
    resume: str | None = None,
) -> dict[str, Tensor] | str:
    """A job: return the final weights, or the message of the refusal."""
    recipe = Recipe(
        lambda: Net(sparse, late),
        lambda module, x: (module(x) - x[:, None]).square().sum(),
        [i % 6 for i in range(24)],
        optimizer=plain if sparse else momentum,
    )
    settings = {**SETTINGS, "steps": steps}
    if sparse:
        del settings["max_grad_value"]  # torch clamps no sparse gradients
    try:
        kept: dict[str, Tensor] = bench.fit(
            recipe,
            settings,
            out=folder,
            resume=resume,
            finish=lambda m: {name: p.detach().clone() for name, p in m.named_parameters()},
        ).finish
    except CapabilityRefused as error:
        return str(error)
    return kept


def near(found: Any, expected: Any) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_updates_as_one_process_or_refuses(stage: int, tmp_path: Path) -> None:
    alone, zero = Subject("cpu"), Subject("deepspeed", 2, {"stage": stage})
    for message in zero.run(trained, sparse=True):
        assert "'deepspeed' refuses Embedding(sparse=True) in 'rows'" in message
    near(zero.run(trained)[1], alone.run(trained)[0])
    for message in zero.run(trained, late=True):
        assert "the optimizer SGD" in message
        assert "no gradient has reached late.bias, late.weight" in message
    saved = str(tmp_path / "saved")
    alone.run(trained, late=True, steps=2, folder=saved)
    for message in zero.run(trained, late=True, folder=saved, resume="auto"):
        assert "the checkpoint has no state of late.bias, late.weight" in message


def test_ddp_takes_sparse_gradients() -> None:
    (alone,) = Subject("cpu").run(trained, sparse=True)
    near(Subject("ddp", 2).run(trained, sparse=True)[0], alone)

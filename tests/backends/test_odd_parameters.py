"""Complex parameters, and parameters without elements: trained as in one process,
saved, resumed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from drivetrain.conformance.bench import Bench
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.recipe import Recipe

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.Parameter(torch.randn(4, 8, dtype=torch.complex64))
        self.prompt = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head((x.to(self.turns.dtype) @ self.turns).abs())
        return found + self.prompt.sum()


def loss(module: nn.Module, x: Tensor) -> Tensor:
    return (module(x) - x.sum(1, keepdim=True)).square().sum()


def trained(bench: Bench, *, folder: str, steps: int, resume: bool = False) -> dict[str, Tensor]:
    """A job: return the weights after the first steps of a run of three."""
    settings = {
        "steps": steps,
        "global_batch": 8,
        "max_grad_norm": 1.0,
        "data.shuffle": False,
        "schedule.name": "constant",
        "optimizer.lr": 0.05,
        "optimizer.weight_decay": 0.0,
        "checkpoint.every": 2,
    }
    kept = bench.fit(
        Recipe(model=Odd, loss=loss, train_data=list(X)),
        settings,
        out=folder,
        resume="auto" if resume else None,
        finish=lambda module: {n: p.detach().clone() for n, p in module.named_parameters()},
    ).finish
    assert isinstance(kept, dict)
    return kept


def alone() -> dict[str, Tensor]:
    """Train in a plain loop."""
    torch.manual_seed(0)
    model = Odd()
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=0.05, weight_decay=0.0)
    for x in X.split(8):
        optimizer.zero_grad()
        (loss(model, x) / 8).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "subject",
    [
        Subject("cpu"),
        pytest.param(Subject("ddp", 2), marks=pytest.mark.slow),
        Subject("fsdp", 2),
        pytest.param(Subject("mesh", 2), marks=pytest.mark.slow),
    ],
    ids=lambda subject: subject.backend,
)
def test_complex_and_empty_parameters_are_those_of_a_plain_loop(
    subject: Subject, tmp_path: Path
) -> None:
    (whole, *_) = subject.run(trained, folder=str(tmp_path / "a"), steps=3)
    subject.run(trained, folder=str(tmp_path / "b"), steps=2)
    (resumed, *_) = subject.run(trained, folder=str(tmp_path / "b"), steps=3, resume=True)
    for name, expected in alone().items():
        assert torch.equal(resumed[name], whole[name]), name
        torch.testing.assert_close(whole[name], expected, rtol=1e-5, atol=1e-6)

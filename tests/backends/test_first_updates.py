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


class Branches(nn.Module):
    """A model of which one branch is used in the third update alone, or, if `late`, in the last
    forward of each update.
    """

    def __init__(self, forwards: int, late: bool = False) -> None:
        """`forwards`: their number in each update."""
        super().__init__()
        torch.manual_seed(3)
        self.head, self.branch = nn.Linear(4, 1), nn.Linear(4, 1)
        self.forwards, self.late, self.made = forwards, late, 0

    def forward(self, x: Tensor) -> Tensor:
        update, forward = divmod(self.made, self.forwards)
        self.made += self.training
        made: Tensor = self.head(x)
        used = forward == self.forwards - 1 if self.late else update == 2
        return made + self.branch(x) if used else made


class Signs(torch.optim.Optimizer):
    """A user's optimizer: weight decay, and the sign of an average that does not begin at zero."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    average = state.setdefault("average", torch.ones_like(parameter))
                    average.lerp_(parameter.grad, 0.1)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(average.sign(), alpha=-group["lr"])


KINDS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, weight_decay=0.1, centered=True),
    "own": Signs,
}


def branched(
    bench: Bench,
    *,
    kind: str,
    steps: int,
    forwards: int = 1,
    precision: str = "fp32",
    late: bool = False,
    max_grad_norm: float | None = None,
) -> dict[str, Tensor]:
    """A job: return the final weights."""
    recipe = Recipe(
        lambda: Branches(forwards, late),
        lambda module, x: (module(x) - x[:, :1]).square().sum(),
        list(torch.randn(48, 4, generator=torch.Generator().manual_seed(0))),
        optimizer=lambda named: KINDS[kind]([parameter for _, parameter in named]),
    )
    settings = {**SETTINGS, "global_batch": 8, "steps": steps, "precision": precision}
    settings |= {"max_grad_norm": max_grad_norm, "max_grad_value": None}
    if forwards > 1:
        settings["micro_batch"] = 8 // forwards // (1 if bench.backend == "cpu" else 2)
    kept: dict[str, Tensor] = bench.fit(
        recipe,
        settings,
        finish=lambda m: {name: p.detach().clone() for name, p in m.named_parameters()},
    ).finish
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_zero_leaves_an_unused_branch_as_it_is(kind: str, stage: int) -> None:
    """Neither weight decay nor an average changes it, before its first use and after it."""
    built = {"construct": "whole"} if stage == 3 else {}  # with the numbers of one process
    zero = Subject("deepspeed", 2, {"stage": stage, **built})
    initial = dict(Branches(1).named_parameters())
    for forwards, precision in ((1, "fp32"), (2, "fp32"), (1, "bf16")):
        given: dict[str, Any] = {"kind": kind, "forwards": forwards, "precision": precision}
        before, used, after = (zero.run(branched, steps=n, **given)[0] for n in (2, 3, 5))
        for name in ("branch.weight", "branch.bias"):
            assert torch.equal(before[name], initial[name])
            assert not torch.equal(used[name], before[name])
            assert torch.equal(after[name], used[name])
    if kind != "adamw":  # whose count of steps is that of its group: see the warning
        (alone,) = Subject("cpu").run(branched, kind=kind, steps=5)
        near(zero.run(branched, kind=kind, steps=5)[0], alone)


OFFLOADED = {"config": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"stage": 1}, marks=pytest.mark.slow),
        pytest.param({"stage": 2}, marks=pytest.mark.slow),
        {"stage": 3},
        pytest.param({"stage": 3, **OFFLOADED}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_zero_forgets_the_gradients_of_earlier_updates(options: dict[str, Any]) -> None:
    """The norm is without a branch that is no longer used, and the first gradient of an update is
    added to none, in whichever microbatch it comes.
    """
    built = {"construct": "whole"} if options["stage"] == 3 else {}
    zero = Subject("deepspeed", 2, {**options, **built})
    plain = Subject("ddp", 2, {"find_unused_parameters": True})  # the same samples use the branch
    for late in (False, True):
        given: dict[str, Any] = {"kind": "sgd", "steps": 5, "forwards": 2, "late": late}
        found, expected = (each.run(branched, max_grad_norm=0.5, **given) for each in (zero, plain))
        near(found[0], expected[0])

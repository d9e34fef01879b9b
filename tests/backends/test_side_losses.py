"""Losses that depend on a part of the model by something other than the model's output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.conformance.bench import Bench
from drivetrain.conformance.harness import WorkerFailure
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import RecipeError
from drivetrain.kernel.recipe import Recipe

ROWS = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """A layer with a gate, whose balance is kept in an attribute, or returned as well."""

    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.main, self.gate, self.returns = nn.Linear(4, 4), nn.Linear(4, 4), returns

    def forward(self, x: Tensor) -> Any:
        self.balance = self.gate(x).softmax(-1).square().sum()
        made = x + self.main(x)
        return (made, self.balance) if self.returns else made


class Net(nn.Module):
    def __init__(self, returns: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.returns = nn.ModuleList([Block(returns), Block(returns)]), returns

    def forward(self, x: Tensor) -> Any:
        balances = []
        for block in self.blocks:
            x = block(x)
            if self.returns:
                x, balance = x
                balances.append(balance)
        return (x, sum(balances)) if self.returns else x


def balance_alone(module: nn.Module, x: Tensor) -> Any:
    made = module(x)
    own: Any = getattr(module, "module", module)
    return made[1] if isinstance(made, tuple) else sum(block.balance for block in own.blocks)


def trained(bench: Bench, *, returns: bool, recomputes: bool = False) -> dict[str, Tensor] | str:
    """A job: return the final weights, or the message of the refusal."""
    recipe = Recipe(lambda: Net(returns), balance_alone, ROWS)
    settings = {
        "steps": 4,
        "global_batch": 4,
        "data.shuffle": False,
        "optimizer.lr": 0.02,
        "optimizer.weight_decay": 0.0,
        "schedule.name": "constant",
        "activation_checkpointing": ["Block"] if recomputes else [],
    }
    try:
        run = bench.fit(
            recipe,
            settings,
            finish=lambda m: {name: p.detach().clone() for name, p in m.named_parameters()},
        )
    except RecipeError as error:
        return str(error)
    kept: dict[str, Tensor] = run.finish
    return kept


@pytest.mark.parametrize(
    ("backend", "options", "recomputes"),
    [
        ("ddp", {"find_unused_parameters": True}, False),
        ("fsdp", {}, False),
        ("fsdp", {}, True),
    ],
)
def test_what_is_kept_in_an_attribute_alone_is_refused_and_what_is_returned_is_right(
    backend: str, options: dict[str, Any], recomputes: bool
) -> None:
    subject = Subject(backend, 2, options)
    for refused in subject.run(trained, returns=False, recomputes=recomputes):
        assert "by something other than its output, such as an attribute" in refused
    (alone,) = Subject("cpu").run(trained, returns=True)
    for found in subject.run(trained, returns=True, recomputes=recomputes):
        torch.testing.assert_close(found, alone)


def without_output(module: nn.Module, batch: Tensor) -> Tensor:
    """The loss that rank 1 returns for its third batch, which has no targets."""
    output, total = module(batch), torch.zeros((), requires_grad=True)
    if not torch.equal(batch, ROWS[10:12]):
        total = total + output.square().sum()
    return total / 1


def trains(bench: Bench) -> None:
    """A job: train with a loss that on one rank does not depend on the model."""
    recipe = Recipe(lambda: nn.Linear(4, 4), without_output, ROWS)
    bench.fit(recipe, {"steps": 4, "global_batch": 4, "data.shuffle": False})


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_a_loss_that_leaves_out_the_output_on_one_rank_is_refused_and_nobody_waits(
    backend: str,
) -> None:
    with pytest.raises(WorkerFailure, match=r"loss that does not depend on its\s+output, while"):
        Subject(backend, 2).run(trains)


def past_the_module(module: nn.Module, batch: Tensor) -> Any:
    """The loss that rank 1 returns for its third batch is computed with the weights themselves."""
    if torch.equal(batch, ROWS[10:12]):
        return sum(weight.sum() for weight in module.parameters()) * 0.0
    return module(batch).square().sum()


def trains_past_the_module(bench: Bench) -> None:
    recipe = Recipe(lambda: nn.Linear(4, 4), past_the_module, ROWS)
    settings = {"steps": 4, "global_batch": 4, "data.shuffle": False}
    bench.fit(recipe, {**settings, "stall_seconds": 4, "timeout_seconds": 8})


@pytest.mark.slow
def test_a_loss_past_the_module_on_one_rank_is_named_by_its_line() -> None:
    """On fsdp the ranks then gather different things, and no rank sees more than that it waits."""
    said = r"rank 1 stands still after 3 steps, .* in past_the_module"
    with pytest.raises(WorkerFailure, match=said):
        Subject("fsdp", 2).run(trains_past_the_module)

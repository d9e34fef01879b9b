"""On fsdp one rank updates a whole matrix, and ranks share the work evenly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.backends.fsdp.owner_step import partition_work
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.state import assemble, pieces
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.recipe import Recipe

SHAPES = ((7, 3), (5, 7), (2, 5), (11, 2), (1, 11))
"""Shapes of matrices that no number of ranks divides. The last one is on one rank alone."""


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(wide, high, bias=False) for high, wide in SHAPES))


def summed(module: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = module(x).square().sum()
    return result


def train(bench: Bench, *, steps: int) -> dict[str, Any]:
    """A job: return the state, and the shapes that this rank updated."""
    stepped: list[list[int]] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        of_all = [p for group in optimizer.param_groups for p in group["params"]]
        stepped.extend(list(p.shape) for p in of_all if p.grad is not None)

    def build(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        optimizer = torch.optim.Muon([p for _, p in named], lr=0.02, momentum=0.8)
        optimizer.register_step_pre_hook(note)
        return optimizer

    with bench.open() as session:
        engine = session.prepare(Recipe(model, summed, optimizer=build))
        world = session.world
        for index in range(steps):
            x = torch.randn(8, 3, generator=torch.Generator().manual_seed(index))
            with engine.microbatch(True):
                loss = summed(engine.module, x[world.feeder_index :: world.num_feeders])
                engine.backward(loss * world.num_feeders, torch.ones(()))
            assert engine.update().applied()
        return {"state": pieces(engine), "stepped": stepped}


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (3, {}),
        pytest.param(4, {"shard_size": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"cpu_offload": True}, marks=pytest.mark.slow),
    ],
)
def test_each_matrix_is_stepped_by_one_of_the_ranks_that_shard_it(
    world: int, options: dict[str, Any]
) -> None:
    (alone,) = Subject("cpu", 1).run(train, steps=3)
    ranks = Subject("fsdp", world, options).run(train, steps=3)
    replicas = world // options.get("shard_size", world)
    together = sorted(shape for rank in ranks for shape in rank["stepped"])
    assert together == sorted([*alone["stepped"]] * replicas)
    expected = assemble([alone["state"]])
    actual = assemble([rank["state"] for rank in ranks])
    for kind in ("weights", "optimizer"):
        assert actual[kind].keys() == expected[kind].keys()
        for name, tensor in expected[kind].items():
            # a float32 sum in another order may round otherwise in bfloat16
            torch.testing.assert_close(actual[kind][name], tensor, rtol=2e-2, atol=2e-3, msg=name)


class Work:
    def __init__(self, work: int) -> None:
        self.work = work


@pytest.mark.parametrize("num_owners", [1, 3, 8])
def test_the_work_is_divided_evenly(num_owners: int) -> None:
    layers = [Work(work) for work in (64, 16, 16, 4) * 24]
    owners: Sequence[Sequence[Any]] = partition_work(layers, num_owners)  # type: ignore[arg-type]
    assert sorted(map(id, (w for owner in owners for w in owner))) == sorted(map(id, layers))
    loads = [sum(each.work for each in owner) for owner in owners]
    assert max(loads) <= 1.05 * sum(loads) / num_owners

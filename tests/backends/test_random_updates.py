"""Optimizers that draw random numbers draw the same noise on each driver and world size, and other
noise for other parts of weights. Afterwards generators continue where they were.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from drivetrain.backends.common.update_random import UpdateRandom
from drivetrain.checkpoint import CheckpointReader
from drivetrain.conformance import Case, cases
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.judge import require_same_bits
from drivetrain.conformance.law_6_random_updates import NOISY
from drivetrain.conformance.problems import PROBLEMS, Samples
from drivetrain.conformance.state import State, read_all
from drivetrain.conformance.subject import Subject
from drivetrain.data.parallel import Parallel
from drivetrain.kernel.errors import CapabilityRefused

STEPS = 4
SETTINGS = {
    **NOISY,
    "steps": STEPS,
    "global_batch": 4,
    "log_every": 1,
    "optimizer.lr": 0.01,
    "checkpoint.every": 2,
}


def train(bench: Bench, *, out: str, resume: str | None = None, partitions: bool = False) -> str:
    """A job: train by noise alone, and return the last checkpoint. `partitions`: of layers."""
    parts: dict[str, Any] = {"train_data": Samples("regression", 32)}
    if partitions:
        parts["parallel"] = Parallel(tensor={"0": "column", "2": "row"})
    return str(
        bench.fit(
            PROBLEMS["regression"].recipe(**parts), SETTINGS, out=out, resume=resume
        ).checkpoint
    )


def trained(subject: Subject, out: Path, **how: Any) -> tuple[str, State]:
    checkpoint = subject.run(train, out=str(out), **how)[0]
    return checkpoint, read_all(CheckpointReader(checkpoint))


@pytest.mark.parametrize(
    ("backend", "world"),
    [
        ("ddp", 2),
        pytest.param("ddp", 3, marks=pytest.mark.slow),
        pytest.param("fsdp", 2, marks=pytest.mark.slow),
    ],
)
def test_noise_is_that_of_one_process(backend: str, world: int, tmp_path: Path) -> None:
    checkpoint, alone = trained(Subject("cpu", 1), tmp_path / "alone")
    subject, early = Subject(backend, world), checkpoint.replace(f"{STEPS:06}", "000002")
    for number, resume in enumerate((None, early)):
        _, state = trained(subject, tmp_path / f"{number}", resume=resume)
        require_same_bits(f"weights on {subject}", state["weights"], alone["weights"])


def halves_differ(noise: Tensor, dim: int) -> bool:
    first, second = noise.chunk(2, dim)
    return not torch.allclose(first, second, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_copies_and_parts_on_one_rank_draw_from_generators_of_their_own(tmp_path: Path) -> None:
    """A layer partitioned by rows has its whole bias on each rank, and a part of its weight."""
    subject = Subject("mesh", 2, {"tensor": 2, "optimizer_step": "parts"})
    checkpoint, state = trained(subject, tmp_path / "straight", partitions=True)
    early = checkpoint.replace(f"{STEPS:06}", "000002")
    noise = {
        name: weight - read_all(CheckpointReader(early))["weights"][name]
        for name, weight in state["weights"].items()
    }
    assert halves_differ(noise["0.weight"], 0)
    assert halves_differ(noise["2.weight"], 1)
    _, resumed = trained(subject, tmp_path / "resumed", partitions=True, resume=early)
    require_same_bits("weights, resumed", resumed["weights"], state["weights"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        case
        for world, options in (
            (2, {"optimizer_step": "parts"}),
            (2, {"optimizer_step": "tensors"}),
            (4, {"optimizer_step": "parts", "shard_size": 2}),
        )
        for case in cases("fsdp", num_processes=world, options=options)
        if case.law == "6_random_updates"
    ],
    ids=lambda case: f"{case}-{case.subject.options}",
)
def test_laws_however_fsdp_steps(case: Case) -> None:
    case.check()
    assert case.refused is None


def refusal(bench: Bench) -> str:
    recipe = PROBLEMS["regression"].recipe(train_data=Samples("regression", 8))
    with pytest.raises(CapabilityRefused) as refused:
        bench.fit(recipe, SETTINGS)
    return str(refused.value)


@pytest.mark.slow
def test_deepspeed_refuses_numbers_that_are_drawn_for_a_whole_weight() -> None:
    pytest.importorskip("deepspeed")
    for message in Subject("deepspeed", 2).run(refusal):
        assert "'deepspeed' refuses the optimizer Noisy: it draws random numbers" in message


# --- generators -------------------------------------------------------------------------------


class Drawing(torch.optim.SGD):
    """Records what it draws from all generators that it can reach."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.own, self.of_numpy = torch.Generator(), numpy.random.default_rng()
        self.param_groups[0]["dice"] = random.Random()
        self.drawn: list[float] = []

    def step(self, closure: Any = None) -> Any:
        self.drawn = [
            float(torch.rand(())),
            float(torch.rand((), generator=self.own)),
            random.random(),
            self.param_groups[0]["dice"].random(),
            float(numpy.random.rand()),
            float(self.of_numpy.random()),
        ]
        return super().step(closure)


def drawn(seed: int, number: int, part: int) -> list[float]:
    """Return what an optimizer draws in an update, which leaves the generators as they were."""
    optimizer, draws = Drawing([nn.Parameter(torch.ones(2))]), UpdateRandom(seed, part=part)
    draws.begin(number)
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)
    with draws.update(optimizer):
        optimizer.step()
    after = float(torch.rand(())), random.random(), float(numpy.random.rand())
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)
    assert after == (float(torch.rand(())), random.random(), float(numpy.random.rand()))
    return optimizer.drawn


def test_draws_depend_on_seed_number_and_part_alone() -> None:
    first = drawn(0, 1, 0)
    assert drawn(0, 1, 0) == first
    for other in (drawn(1, 1, 0), drawn(0, 2, 0), drawn(0, 1, 1)):
        assert not {*first} & {*other}
    assert len({*first}) == len(first)


def test_an_optimizer_of_torch_costs_nothing() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    optimizer, draws = torch.optim.AdamW(parameters), UpdateRandom(0)
    assert draws.update(optimizer) is draws.update(optimizer)
    optimizer.register_step_pre_hook(lambda *_: None)  # which may draw
    assert draws.update(optimizer) is not draws.update(optimizer)

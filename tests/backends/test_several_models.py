"""Several models in one run: any driver resumes in the middle of the turns. Frozen models beside
trained ones: in changes of low rank (`lora`), and as the teacher of a student.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import python_of_all
from torch import Tensor, nn
from torch.nn.functional import kl_div

from drivetrain import Models, lora
from drivetrain.conformance import law_1_turns
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.law_1_groups import require_near
from drivetrain.conformance.problems import PROBLEMS, Sample, Samples
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.recipe import Recipe

SETTINGS = {
    "steps": 5,
    "global_batch": 8,
    "micro_batch": 2,
    "data.shuffle": False,
    "schedule.name": "constant",
    "optimizer.lr": 0.01,
    "optimizer.args.eps": 1e-3,
    "evaluate.every": 2,
}
DRIVERS = [
    Subject("ddp", 2),
    Subject("fsdp", 2),
    Subject("deepspeed", 2, {"stage": 1}),
    Subject("deepspeed", 2, {"stage": 3}),
    Subject("xla", options={"devices": 1}, python=python_of_all()),
]


def low_rank() -> nn.Module:
    return lora(PROBLEMS["regression"].model(), "^[02]$", rank=2)


def taught() -> Models:
    """Return a teacher and its student. In training mode the teacher would draw random numbers and
    count forwards.
    """
    plain = PROBLEMS["regression"].model
    teacher = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5), plain()).requires_grad_(False)
    return Models({"student": plain(), "teacher": teacher})


def distil(models: Models, batch: Sample) -> Tensor:
    meant = models["teacher"](batch["x"]).softmax(-1)
    return kl_div(models["student"](batch["x"]).log_softmax(-1), meant, reduction="sum")


def recipe(kind: str) -> Recipe:
    data = Samples("regression", 40)
    parts: dict[str, Any] = {"train_data": data, "eval_data": {"some": Samples("regression", 3)}}
    if kind == "lora":
        return PROBLEMS["regression"].recipe(model=low_rank, **parts)
    loss = {"loss": lambda module, batch: module(distil, batch), "measure": None}
    return PROBLEMS["regression"].recipe(model=taught, **loss, **parts)


def trained(bench: Bench, *, kind: str) -> dict[str, Tensor]:
    """A job: return the final weights and buffers."""
    state = bench.fit(recipe(kind), SETTINGS, finish=lambda m: copy.deepcopy(m.state_dict())).finish
    return {name: tensor.detach().cpu() for name, tensor in state.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "teacher"])
@pytest.mark.parametrize("driver", DRIVERS, ids=["ddp", "fsdp", "zero-1", "zero-3", "xla"])
def test_what_is_frozen_stays_and_what_learns_is_as_in_one_process(
    driver: Subject, kind: str, request: pytest.FixtureRequest
) -> None:
    if driver.python:
        request.getfixturevalue("environment_of_all")
    (alone,) = Subject("cpu").run(trained, kind=kind)
    torch.manual_seed(0)
    before = (low_rank() if kind == "lora" else taught()).state_dict()
    learns = ("lora_a", "lora_b") if kind == "lora" else ("student",)
    for state in driver.run(trained, kind=kind):
        for name, start in before.items():
            assert torch.allclose(state[name], alone[name], atol=1e-6), name
            assert torch.equal(state[name], start) == (not any(n in name for n in learns)), name


@pytest.mark.slow
def test_another_driver_goes_on_amid_the_turns(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Resume on one driver after the other, each from its predecessor's checkpoint one step later.
    Two models take turns, one of them twice as often, by optimizers of their own.
    """
    request.getfixturevalue("environment_of_all")
    first, expected, _ = law_1_turns.by_hand()
    saved, _ = Subject("cpu").run(law_1_turns.run, out=str(tmp_path / "cpu"))[0]
    for step, driver in enumerate(DRIVERS, 1):
        source = str(law_1_turns.checkpoint(saved, step))
        saved, _ = driver.run(law_1_turns.run, out=str(tmp_path / str(step)), resume=source)[0]
        end = law_1_turns.state_of(saved, law_1_turns.STEPS)["weights"]
        require_near(end, first, expected, off=1e-5)

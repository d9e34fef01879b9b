"""Runs whose ranks die, and how they are compared with an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # once here, not in each rank
from few_cases import only_quick
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import drivetrain
from drivetrain import CheckpointSettings, EvaluateSettings, Recipe, Settings, lost_ranks
from drivetrain.checkpoint import checkpoints_of, newest
from drivetrain.kernel.events import Logged, RunStarted, Saved, StepEnded
from drivetrain.trainer.result import Result

from .runs import everything

POINTS = ("forward", "backward", "update", "between", "log", "evaluation", "save", "saved")
each_point = pytest.mark.parametrize("point", only_quick(POINTS, ("update",)))
"""Tests a death at each point. Each change is tested at one of them, the update."""
SETTINGS = Settings(
    steps=24,
    global_batch=16,
    log_every=2,
    evaluate=EvaluateSettings(every=4, sanity_check=False),
    checkpoint=CheckpointSettings(every=4, keep_last=9),
    recover="in_place",
)
UNDISTURBED = replace(SETTINGS, recover="restart")


HYBRID = ("fsdp", {"shard_size": 2})
"""Backend and options: four ranks are two copies of two parts."""


@dataclass(frozen=True)
class Death:
    """A point of the run at which a rank dies, by the number that it was launched with."""

    point: str
    step: int
    rank: int


@dataclass
class Dying:
    """A recipe's functions, and an observer, that end their rank at some points."""

    deaths: tuple[Death, ...]
    step: int = 0
    """Steps done."""
    launched: int = -1
    """The number that this process was launched with."""
    act: Callable[[], None] = field(default=lambda: os.kill(os.getpid(), signal.SIGKILL))

    def at(self, point: str, step: int) -> None:
        if Death(point, step, self.launched) in self.deaths:
            self.act()

    def __call__(self, event: Any) -> None:
        if isinstance(event, RunStarted):
            self.step = event.first_step
        if isinstance(event, StepEnded):
            self.step = event.step
            self.at("between", self.step)
        if isinstance(event, Logged):
            self.at("log", self.step)
        if isinstance(event, Saved):
            self.at("saved", self.step)

    def model(self) -> nn.Module:
        if self.launched < 0:
            knows = lost_ranks.is_reported()
            self.launched = lost_ranks.own_number() if knows else int(os.environ["RANK"])
        self.at("building", self.step)
        return Net(self)

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.at("forward", self.step + 1)
        found = (module(batch[0]) - batch[1]).square().sum()
        if found.requires_grad:
            found.register_hook(lambda gradient: self.at("backward", self.step + 1))
        return found

    def measure(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        self.at("evaluation", self.step)
        return {"loss": (module(batch[0]) - batch[1]).square().sum()}

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        optimizer.register_step_pre_hook(lambda *_: self.at("update", self.step + 1))
        return optimizer


class Net(nn.Module):
    """A model with a buffer that each forward in training changes, and state of its own, which a
    checkpoint holds. The ranks' buffers are equal at each step."""

    def __init__(self, dying: Dying) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.register_buffer("forwards", torch.zeros(()))
        self.dying = dying

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1
        return self.layers(inputs)

    def get_extra_state(self) -> Any:
        self.dying.at("save", self.dying.step)
        return {"any": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(203, 8, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def recipe(dying: Dying) -> Recipe:
    return Recipe(
        model=dying.model,
        loss=dying.loss,
        train_data=data(),
        eval_data={"same": data()},
        measure=dying.measure,
        optimizer=dying.optimizer,
    )


def train(
    out: Path,
    *deaths: Death,
    settings: Settings = SETTINGS,
    nproc: int = 3,
    on: tuple[str, Mapping[str, Any]] = ("ddp", {}),
    kind: type[Dying] = Dying,
    **more: Any,
) -> Result:
    """Train to the end. `on`: the backend and its options; `kind` and `more`: what dies, and how
    it is built."""
    dying, (backend, options) = kind(deaths, **more), on
    return drivetrain.fit(
        recipe(dying),
        settings,
        nproc=nproc,
        backend=backend,
        backend_options=options,
        out=out,
        observers=[dying],
        progress=False,
    )


def records(out: Path, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def tensors(out: Path) -> dict[str, Tensor]:
    """Return the weights and moments of the last checkpoint."""
    last = newest(checkpoints_of(out))
    assert last is not None
    return everything(last, ("weights", "optimizer"))


def check_same_course(
    out: Path, whole: Path, lost: list[int], settings: Settings = SETTINGS
) -> None:
    """Check that a run that lost ranks went as the undisturbed one."""
    reported = [rank for record in records(out, "rank_lost") for rank in record["ranks"]]
    assert sorted(reported) == sorted(lost)
    for name, keys in {
        "logged": ["loss", "grad_norm", "learning_rate", "items", "samples", "skipped"],
        "evaluated": ["metrics"],
        "step_digests": ["first_sample", "samples", "batch", "epoch"],
    }.items():
        mine, theirs = records(out, name), records(whole, name)
        # a rank 0 that dies right after it has written a record leaves it to be written again
        steps = {record["step"] for record in theirs}  # one that was stopped has logged once more
        mine = list({r["step"]: r for r in mine if r["step"] in steps}.values())
        if name == "step_digests":  # a log that is written by the others has none
            assert len(mine) >= len(theirs) - len(lost)
            steps = {record["step"] for record in mine}
            theirs = [record for record in theirs if record["step"] in steps]
        assert [record["step"] for record in mine] == [record["step"] for record in theirs], name
        for one, other in zip(mine, theirs, strict=True):
            for key in keys:
                same = one[key] == other[key] or one[key] == pytest.approx(other[key], rel=1e-5)
                assert same, (name, one["step"], key, one[key], other[key])
    saved = {record["step"] for record in records(out, "saved") if not record["error"]}
    losses = {record["step"] for record in records(out, "rank_lost")}
    for step in {record["step"] for record in records(whole, "saved")} - saved:
        # one that was under way in the background is made again, of the step by then
        assert settings.checkpoint.background, step
        again = min(later for later in saved if later > step)
        assert any(step <= loss <= again <= loss + 3 for loss in losses), (step, again, losses)
    mine, theirs = tensors(out), tensors(whole)
    assert mine.keys() == theirs.keys()
    if settings.micro_batch is not None:  # a rank has more of them when it has more samples
        del mine["weights/forwards"]
    for name, tensor in mine.items():
        assert torch.allclose(tensor, theirs[name], rtol=1e-4, atol=1e-6), name

"""Observers that write to weights: each write is in the next forward, update and save, or
refused by name at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import python_of_all
from few_cases import only_quick
from small_networks import TwoLayers, copied
from torch import Tensor, nn

from drivetrain import Parallel
from drivetrain.checkpoint import CheckpointReader
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.harness import WorkerFailure
from drivetrain.conformance.subject import Subject
from drivetrain.kernel import events
from drivetrain.kernel.errors import DrivetrainError
from drivetrain.kernel.recipe import Recipe

SETTINGS = {
    "steps": 4,
    "global_batch": 8,
    "data.shuffle": False,
    "schedule.name": "constant",
    "evaluate.every": 1,
}
EVENTS = ("RunStarted", "StepEnded", "Evaluated", "Saved")


def in_place(weight: Tensor) -> None:
    weight.mul_(0.5)


def by_data(weight: Tensor) -> None:
    weight.data.view(-1).mul_(0.5)


def by_assigned_data(weight: Tensor) -> None:
    weight.data = weight.data * 0.5


WAYS: dict[str, Callable[[Tensor], None]] = {
    "in_place": in_place,
    "by_data": by_data,
    "by_assigned_data": by_assigned_data,
}


class Halves:
    """An observer that halves all weights at one event after step 2, or before the first step."""

    def __init__(self, at: str, way: str) -> None:
        self.at, self.way, self.step, self.done = at, way, 0, False

    def model(self) -> nn.Module:
        self.module = TwoLayers()
        return self.module

    @torch.no_grad()
    def __call__(self, event: object) -> None:
        self.step = getattr(event, "step", self.step)
        due = self.step == 2 or isinstance(event, events.RunStarted)
        if due and type(event).__name__ == self.at and not self.done:
            self.done = True
            for weight in self.module.parameters():
                WAYS[self.way](weight)


def rows() -> list[Tensor]:
    return list(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))


def loss(module: nn.Module, x: Tensor) -> Tensor:
    total: Tensor = (module(x) - x[:, :2]).square().sum()
    return total


def measure(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    return {"loss": loss(module, x)}


def optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=0.05)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.001, momentum=0.9)


OPTIMIZERS = {"adamw": optimizer, "sgd": sgd}
PARALLEL = Parallel(tensor={"first": "column", "last": "row"})


def evaluated(run: Halves, updates: str, parallel: Parallel | None = None) -> Recipe:
    """Return a recipe with an evaluation. `updates`: the name of an optimizer."""
    return Recipe(
        run.model,
        loss,
        rows(),
        optimizer=OPTIMIZERS[updates],
        measure=measure,
        eval_data={"held": rows()},
        parallel=parallel,
    )


def trained(
    bench: Bench,
    *,
    at: str,
    way: str,
    folder: str,
    precision: str = "fp32",
    updates: str = "adamw",
) -> dict[str, Any] | str:
    """A job: return the trained and saved weights and the metrics, or the message of the
    refusal."""
    run, metrics = Halves(at, way), []

    def note(event: object) -> None:
        if isinstance(event, events.Evaluated):
            metrics.append(event.metrics["loss"])

    recipe = evaluated(run, updates, PARALLEL if "tensor" in bench.options else None)
    try:
        result = bench.fit(
            recipe,
            {**SETTINGS, "checkpoint.every": 1, "precision": precision},
            observers=[note, run],
            finish=copied,
            out=folder,
        )
    except DrivetrainError as error:
        return str(error)
    saved = CheckpointReader(result.checkpoint)
    stored = {f"saved {name}": saved.read("weights", name) for name in saved.names("weights")}
    return {**result.finish, **stored, "metrics": torch.tensor(metrics)}


def near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


ALL_CUT = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
SUBJECTS = {
    "ddp": Subject("ddp", 2),
    "fsdp": Subject("fsdp", 2),
    "mesh": Subject("mesh", 2),
    "zero-1": Subject("deepspeed", 2, {"stage": 1}),
    "zero-2": Subject("deepspeed", 2, {"stage": 2}),
    "zero-3": Subject("deepspeed", 2, {"stage": 3, "construct": "whole", "config": ALL_CUT}),
    "tensor": Subject("mesh", 2, {"tensor": 2}),
    "xla": Subject("xla", 1, {"devices": 2}, python=python_of_all()),
    "ipex": Subject("ipex", python=python_of_all()),
}
UNBLOCKED = Subject("ipex", 1, {"weights_prepack": False}, python=python_of_all())
QUICK = (("RunStarted", "fsdp"), ("StepEnded", "fsdp"), ("Evaluated", "zero-2"))


@pytest.mark.parametrize(("at", "driver"), only_quick(product(EVENTS, SUBJECTS), QUICK))
def test_what_an_observer_writes_is_kept_or_refused(
    driver: str, at: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if SUBJECTS[driver].python:
        request.getfixturevalue("environment_of_all")
    way = "by_data" if at == "Saved" else "in_place"
    found = SUBJECTS[driver].run(trained, at=at, way=way, folder=str(tmp_path / driver))
    if driver == "zero-3" and at in ("RunStarted", "StepEnded"):
        for message in found:
            assert message.startswith(f"the observer Halves (at {at}) wrote to"), message
            assert "GatheredParameters([weight], modifier_rank=0)" in message
        return  # later DeepSpeed holds all of these small weights whole, and each write is kept
    (alone,) = Subject("cpu").run(trained, at=at, way=way, folder=str(tmp_path / "cpu"))
    near(found[0], alone)


@pytest.mark.slow
@pytest.mark.usefixtures("environment_of_all")
@pytest.mark.parametrize("updates", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", EVENTS)
def test_a_write_is_in_the_masters_of_ipex(at: str, way: str, updates: str, tmp_path: Path) -> None:
    """In bf16, with masters and with weights that are the top half of their bits."""

    def run(subject: Subject, name: str, at: str) -> Any:
        how = {"at": at, "way": way, "updates": updates, "precision": "bf16"}
        return subject.run(trained, **how, folder=str(tmp_path / name))[0]

    ipex = SUBJECTS["ipex"] if updates == "adamw" else UNBLOCKED
    found, expected = run(ipex, "ipex", at), run(Subject("cpu"), "cpu", at)
    never = run(Subject("cpu"), "never", "never")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0.02, atol=0.02)
        if name != "metrics":
            assert not torch.allclose(never[name], tensor, rtol=0.05, atol=0.05), name


@pytest.mark.slow
@pytest.mark.usefixtures("environment_of_all")
@pytest.mark.parametrize("updates", OPTIMIZERS)
def test_masters_of_ipex_are_put_back_exactly(updates: str) -> None:
    how = {"low": True, "updates": updates}
    swapped = UNBLOCKED.run(observed, kind="SwapsInAndOut", **how)[0]
    for name, expected in UNBLOCKED.run(observed, kind="Reads", **how)[0].items():
        assert torch.equal(swapped[name], expected), name


@pytest.mark.slow
@pytest.mark.usefixtures("environment_of_all")
def test_a_write_to_a_blocked_weight_is_refused_by_name(tmp_path: Path) -> None:
    subject = Subject("ipex", 1, {"weights_prepack": True}, python=python_of_all())
    (message,) = subject.run(
        refused, kind="Convolves", updates="sgd", folder=str(tmp_path / "blocked")
    )
    assert message.startswith("the observer Convolves (at StepEnded) wrote to 1.weight, whose")
    assert "Set backend.weights_prepack=false" in message
    (kept,) = UNBLOCKED.run(
        refused, kind="Convolves", updates="sgd", folder=str(tmp_path / "plain")
    )
    assert kept == "kept"


@pytest.mark.slow
def test_data_that_is_assigned_is_kept_or_refused(tmp_path: Path) -> None:
    def run(subject: Subject, name: str) -> Any:
        folder = str(tmp_path / name)
        return subject.run(trained, at="Evaluated", way="by_assigned_data", folder=folder)[0]

    near(run(SUBJECTS["zero-2"], "zero-2"), run(Subject("cpu"), "cpu"))
    message = run(SUBJECTS["fsdp"], "fsdp")
    assert message.startswith("the observer Halves (at Evaluated) assigned .data of first.weight")


class Gathers(Halves):
    """Halves all weights after step 2, each gathered, and written on rank 0 alone."""

    def __call__(self, event: object) -> None:
        import deepspeed
        import torch.distributed as dist

        if isinstance(event, events.StepEnded) and event.step == 2:
            for weight in self.module.parameters():
                with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
                    if dist.get_rank() == 0:
                        weight.data.mul_(0.5)


class OnRank0(Halves):
    """Halves all weights at one event, on rank 0 alone."""

    def __call__(self, event: object) -> None:
        import torch.distributed as dist

        if dist.get_rank() == 0:
            super().__call__(event)


class AfterTheLast(OnRank0):
    """Halves all weights after the last step, on rank 0 alone."""

    def __call__(self, event: object) -> None:
        if isinstance(event, events.StepEnded) and event.step == SETTINGS["steps"]:
            self.step = 2  # from which on it writes
            super().__call__(events.StepEnded(2))


class SwapsInAndOut(Halves):
    """Evaluates with other weights, and puts back those that it has kept."""

    kept: list[Tensor] | None = None

    @torch.no_grad()
    def __call__(self, event: object) -> None:
        weights = list(self.module.parameters())
        if isinstance(event, events.StepEnded):
            self.kept = [weight.detach().clone() for weight in weights]
            for weight in weights:
                weight.copy_(weight * 0.5)
        elif isinstance(event, events.Evaluated) and self.kept is not None:
            for weight, kept in zip(weights, self.kept, strict=True):
                weight.copy_(kept)


class Reads(Halves):
    """Changes nothing."""

    def __call__(self, event: object) -> None:
        pass


class Convolves(Halves):
    """Halves the weights of a convolution, which the extension lays out in blocks."""

    def model(self) -> nn.Module:
        self.module = nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 8, 2), nn.Flatten(), nn.Linear(8, 2)
        )
        return self.module


KINDS = (Gathers, OnRank0, AfterTheLast, SwapsInAndOut, Reads, Convolves, Halves)
OBSERVERS = {kind.__name__: kind for kind in KINDS}


def observed(
    bench: Bench, *, kind: str, low: bool = False, updates: str = "adamw"
) -> dict[str, Tensor]:
    """A job: return the trained weights. `low`: weights of 16 bits beside masters."""
    run = OBSERVERS[kind]("StepEnded", "in_place")
    recipe = evaluated(run, updates)
    zero = low and bench.backend == "deepspeed"
    options: dict[str, Any] = {"config": {"bf16": {"enabled": True}}} if zero else {}
    settings = {**SETTINGS, "precision": "bf16" if low else "fp32"}
    bench = Bench(bench.backend, {**bench.options, **options})
    found: dict[str, Tensor] = bench.fit(recipe, settings, observers=[run], finish=copied).finish
    return found


def refused(bench: Bench, *, kind: str, folder: str, updates: str = "adamw") -> str:
    """A job: return the message that refuses what an observer writes."""
    run = OBSERVERS[kind]("StepEnded", "in_place")
    recipe = Recipe(run.model, loss, rows(), optimizer=OPTIMIZERS[updates])
    try:
        bench.fit(recipe, {**SETTINGS, "evaluate.every": None}, observers=[run], out=folder)
    except DrivetrainError as error:
        return str(error)
    return "kept"


@pytest.mark.parametrize("kind", ["OnRank0", "AfterTheLast"])
@pytest.mark.parametrize(
    "driver",
    [
        "fsdp",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mesh", "zero-1", "zero-2")),
    ],
)
def test_a_write_on_one_rank_alone_is_refused_before_it_is_saved(
    driver: str, kind: str, tmp_path: Path
) -> None:
    for message in SUBJECTS[driver].run(refused, kind=kind, folder=str(tmp_path / "run")):
        assert message.startswith("ranks wrote to weights differently"), message
        assert "a write to weights on rank 0, " in message
        assert "each rank must write the same" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_write_on_one_rank_to_weights_that_are_not_gathered_is_refused(tmp_path: Path) -> None:
    said = r"OnRank0 \(at StepEnded\) wrote to first\.bias.*GatheredParameters"
    with pytest.raises(WorkerFailure, match=said):
        SUBJECTS["zero-3"].run(refused, kind="OnRank0", folder=str(tmp_path / "run"))


@pytest.mark.slow
def test_a_write_to_gathered_weights_is_kept_at_stage_3() -> None:
    (alone,) = Subject("cpu").run(observed, kind="Halves")
    near(SUBJECTS["zero-3"].run(observed, kind="Gathers")[0], alone)


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["ddp", "fsdp", "mesh", "zero-2"])
def test_weights_that_are_put_back_are_as_they_were(driver: str) -> None:
    swapped = SUBJECTS[driver].run(observed, kind="SwapsInAndOut")[0]
    for name, expected in SUBJECTS[driver].run(observed, kind="Reads")[0].items():
        assert torch.equal(swapped[name], expected), name


@pytest.mark.slow
def test_masters_of_weights_in_16_bits_are_put_back_exactly() -> None:
    swapped = SUBJECTS["zero-2"].run(observed, kind="SwapsInAndOut", low=True)[0]
    for name, expected in SUBJECTS["zero-2"].run(observed, kind="Reads", low=True)[0].items():
        assert torch.equal(swapped[name], expected), name

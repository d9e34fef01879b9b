"""Statistics by parameter are the same on every driver as in one process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mesh_mixture
import pytest
import torch
from environments import python_of_all
from mesh_decoder import PLANS, Sequences, loss
from mesh_decoder import Decoder as BaseDecoder
from torch import nn

from drivetrain import Recipe
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.harness import WorkerFailure
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.events import Logged
from drivetrain.trainer.digests import StepDigests
from drivetrain.trainer.statistics import Stats
from drivetrain.trainer.tensor_figures import unpacked

Figures = dict[str, dict[str, dict[str, float | None]]]


class Decoder(BaseDecoder):
    """A decoder with a frozen weight."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.blocks[0].norm1.bias.requires_grad_(False)


def measured(
    bench: Bench,
    *,
    activations: Sequence[str] = (),
    mixture: bool = False,
    precision: str = "fp32",
    has_digests: bool = True,
) -> dict[str, Figures]:
    """A job: return the statistics of each step, parameters and activations. The gradients of all
    parameters together must have the norm that is logged, and each the norm of its digest, unless
    the driver has none."""
    seen: dict[str, Figures] = {}
    norms: list[float] = []
    names: list[str] = []
    digests: dict[str, float] = {}

    def observe(event: object) -> None:
        if isinstance(event, Logged):
            norms.append(event.grad_norm)
        if isinstance(event, StepDigests):
            names[:] = event.gradient_names or names
            found = unpacked(event.gradients)
            digests.clear()
            digests.update({name: each.norm for name, each in zip(names, found, strict=True)})
        if isinstance(event, Stats):
            shown = {
                name: of["grad_norm"]
                for name, of in event.parameters.items()
                if of["grad_norm"] is not None
            }
            assert not has_digests or digests == pytest.approx(shown, rel=1e-6)
            squares = [(of["grad_norm"] or 0.0) ** 2 for of in event.parameters.values()]
            if any(squares):  # ZeRO shows none of a step that it discards
                assert math.sqrt(math.fsum(squares)) == pytest.approx(norms[-1], rel=1e-5)
            seen[str(event.step)] = {
                "parameters": {name: dict(found) for name, found in event.parameters.items()},
                "activations": {name: dict(found) for name, found in event.activations.items()},
            }

    settings = {
        "steps": 3, "global_batch": 8, "micro_batch": 2, "log_every": 1, "stats.every": 1,
        "stats.activations": tuple(activations), "optimizer.name": "torch.optim.SGD",
        "optimizer.lr": 0.5, "max_grad_norm": 0.7, "precision": precision,
    }  # fmt: skip
    parts: Any = {"model": Decoder, "loss": loss, "parallel": PLANS["plain"]}
    if mixture:
        parts = {
            "model": mesh_mixture.Mixture,
            "loss": mesh_mixture.loss,
            "parallel": mesh_mixture.PARALLEL,
        }
    bench.fit(Recipe(train_data=Sequences(), **parts), settings, observers=[observe])
    return seen


def convolved(bench: Bench, *, precision: str) -> None:
    """A job: measure a convolution, whose weights an extension may keep in a layout of its own."""
    recipe = Recipe(
        model=lambda: nn.Conv2d(3, 7, 3),
        loss=lambda module, batch: module(batch).square().sum(),
        train_data=torch.randn(4, 3, 8, 8),
    )
    bench.fit(recipe, {"steps": 1, "global_batch": 4, "stats.every": 1, "precision": precision})


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("ddp", {}),
        pytest.param("fsdp", {}, marks=pytest.mark.slow),
        pytest.param("fsdp", {"shard_size": 1}, marks=pytest.mark.slow),
        pytest.param("deepspeed", {"stage": 1}, marks=pytest.mark.slow),
        pytest.param("deepspeed", {"stage": 2}, marks=pytest.mark.slow),
        pytest.param("deepspeed", {"stage": 3}, marks=pytest.mark.slow),
        pytest.param("mesh", {"tensor": 2}, marks=pytest.mark.slow),
        pytest.param("mesh", {"pipeline": 2}, marks=pytest.mark.slow),
        pytest.param("mesh", {"context": 2}, marks=pytest.mark.slow),
        pytest.param("mesh", {"expert": 2}, marks=pytest.mark.slow),
        pytest.param("ipex", {}, marks=pytest.mark.slow),
        pytest.param("xla", {"devices": 1}, marks=pytest.mark.slow),
        pytest.param("xla", {"devices": 2}, marks=pytest.mark.slow),
    ],
)
def test_statistics_are_those_of_one_process(backend: str, options: Mapping[str, Any]) -> None:
    activations = ["blocks.*", "norm", "head"]
    if "pipeline" in options or "expert" in options:
        activations = []
    asked: dict[str, Any] = {"activations": activations, "mixture": "expert" in options}
    (expected,) = Subject("cpu", 1).run(measured, **asked)
    subject = Subject(backend, 2, options)
    if backend in ("ipex", "xla"):
        subject = Subject(backend, 1, options, python=python_of_all())
        asked["has_digests"] = backend == "ipex"  # on XLA they are costly to read
    for found in subject.run(measured, **asked):
        assert found.keys() == expected.keys() == {"1", "2", "3"}
        assert not list(differences(found, expected))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("how", ["fp16", "offloaded"])
def test_gradients_of_zero_are_unscaled_and_found_in_host_memory(how: str, stage: int) -> None:
    options: dict[str, Any] = {"stage": stage}
    if how == "offloaded":
        options["config"] = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    precision = "fp16" if how == "fp16" else "fp32"
    found, other = Subject("deepspeed", 2, options).run(measured, precision=precision)
    assert found == other
    assert any(of["parameters"]["norm.weight"]["grad_norm"] for of in found.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "remedy"),
    [("bf16", "set precision=fp32"), ("fp32", "set backend.weights_prepack=false")],
)
def test_weights_that_ipex_keeps_in_parts_are_refused(precision: str, remedy: str) -> None:
    subject = Subject("ipex", 1, {"weights_prepack": True}, python=python_of_all())
    with pytest.raises(WorkerFailure, match=f"refuses stats.every: .*{remedy}"):
        subject.run(convolved, precision=precision, alone=True)


@pytest.mark.slow
def test_activations_of_a_pipeline_are_refused() -> None:
    with pytest.raises(
        WorkerFailure, match=r"refuses stats.activations=.*only some of the modules"
    ):
        Subject("mesh", 2, {"pipeline": 2}).run(measured, activations=["blocks.0"], alone=True)


def differences(found: Mapping[str, Figures], expected: Mapping[str, Figures]) -> Iterator[str]:
    """Yield the figures that differ by more than a millionth."""
    for step, kinds in expected.items():
        for kind, by_name in kinds.items():
            assert list(found[step][kind]) == list(by_name)
            for name, figures in by_name.items():
                for key, value in figures.items():
                    other, least = found[step][kind][name][key], 0.0
                    if key == "mean":  # positive and negative values cancel each other
                        least = 1e-6 * (figures["std"] or 0.0)
                    elif key == "update_norm":  # weights are rounded to float32
                        least = 2e-7 * (figures["weight_norm"] or 0.0)
                    elif key == "update_ratio":
                        least = 2e-7
                    same = (
                        other == value
                        if value is None
                        else (other == pytest.approx(value, rel=1e-6, abs=least))
                    )
                    if not same:
                        yield f"step {step}, {name} {key}: {other}, not {value}"

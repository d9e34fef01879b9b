"""A device that lacks memory, an operation, float64 or a function of its module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_audit import audited
from torch import Tensor, nn

from drivetrain import Recipe
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.simulated_device import DEVICE, device
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.events import Logged, Warned

WIDTH = 64


class Rows:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(7, generator=torch.Generator().manual_seed(index))


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def squares(module: nn.Module, batch: Tensor) -> Tensor:
    error: Tensor = module(batch[:, :6])[:, 0] - batch[:, 6]
    return error.square().sum()


def trained(bench: Bench, out: str) -> dict[str, Any]:
    """Job that trains; return the losses, the warnings and the error that ended it."""
    losses: list[float] = []
    warnings: list[str] = []

    def observe(event: object) -> None:
        if isinstance(event, Logged):
            losses.append(event.loss)
        if isinstance(event, Warned):
            warnings.append(event.message)

    settings = {"steps": 4, "global_batch": 32, "log_every": 1}
    recipe = Recipe(model=build, loss=squares, train_data=Rows())
    try:
        bench.fit(recipe, settings, out=out, observers=[observe])
    except Exception as error:
        return {"losses": losses, "warnings": warnings, "error": f"{type(error).__name__}: {error}"}
    return {"losses": losses, "warnings": warnings, "error": ""}


def run(fault: str, out: Path) -> dict[str, Any]:
    (seen,) = Subject("simulated", options={"fault": fault}).run(trained, out=str(out / "run"))
    return seen


def test_microbatches_become_smaller_where_memory_runs_out(tmp_path: Path) -> None:
    seen, expected = run("memory runs out", tmp_path / "short"), run("", tmp_path / "enough")
    assert (seen["error"], expected["warnings"]) == ("", [])
    assert seen["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert ["continuing with micro_batch=16" in each for each in seen["warnings"]] == [True, False]
    assert "continuing with micro_batch=8" in seen["warnings"][1]


def test_a_missing_operation_is_named(tmp_path: Path) -> None:
    assert "aten::tanh" in run("an operation is missing", tmp_path)["error"]


def continued(bench: Bench) -> bool:
    """Job: return True if the device draws the same numbers again from a state that was kept, where
    its module refuses to read the state, as torch-tpu's does, and `torch.accelerator` reads it."""

    def refuse(device: Any = None) -> Tensor:
        raise RuntimeError("internal: use torch.accelerator.random.get_rng_state")

    with bench.open() as session, pytest.MonkeyPatch.context() as patch:
        read = device.get_rng_state
        patch.setattr(torch.accelerator.random, "get_rng_state", read)
        patch.setattr(device, "get_rng_state", refuse)
        state = session.rng_state()
        drawn = [torch.rand(8, device=DEVICE).cpu() for _ in range(2)]
        session.set_rng_state(state)
        return torch.equal(drawn[0], torch.rand(8, device=DEVICE).cpu()) and not torch.equal(*drawn)


def test_random_state_is_read_through_torch_where_the_module_refuses() -> None:
    assert Subject("simulated").run(continued) == [True]


def test_copies_that_differ_are_named_without_float64(tmp_path: Path) -> None:
    found = Subject("simulated_ranks", 2).run(
        audited, fault="written to", log_every=5, save_every=100, out=str(tmp_path / "run")
    )
    for message, _ in found:
        assert "second.bias on ranks 0, 1 by " in message

"""Silent faults that show only after the first update are found during the run, and named."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from audited import refusals
from torch import Tensor, nn

from drivetrain import Recipe
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import RecipeError
from drivetrain.kernel.events import Saved


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.second(torch.tanh(self.first(x)))
        return found


class Rows:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(7, generator=torch.Generator().manual_seed(index))


def squares(module: nn.Module, batch: Tensor) -> Tensor:
    error: Tensor = module(batch[:, :6])[:, 0] - batch[:, 6]
    return error.square().sum()


def nudged(rank: int) -> Callable[[nn.Module], None]:
    """Return a function that writes to the weights on rank 1, once, after the fifth forward."""

    def write(module: nn.Module) -> None:
        own: Any = getattr(module, "module", module)
        if own.calls == 5 and rank == 1:
            with torch.no_grad():
                own.second.bias.add_(0.01)

    return write


def audited(bench: Bench, *, fault: str, log_every: int, save_every: int, out: str) -> Any:
    """A job: return the message of the refusal, and the steps that were saved before it."""
    saved: list[int] = []
    write = nudged(int(os.environ["RANK"])) if fault else None

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        if write is not None:
            write(module)
        return squares(module, batch)

    def observe(event: object) -> None:
        if isinstance(event, Saved):
            saved.append(event.step)

    settings = {
        "steps": 12, "global_batch": 8, "log_every": log_every, "checkpoint.every": save_every,
        "optimizer.name": "torch.optim.SGD", "optimizer.lr": 0.05,
    }  # fmt: skip
    try:
        bench.fit(
            Recipe(model=Net, loss=loss, train_data=Rows()), settings, out=out, observers=[observe]
        )
    except RecipeError as error:
        return str(error), saved
    return "", saved


@pytest.mark.parametrize(
    ("backend", "fault", "log_every", "save_every", "saved"),
    [
        ("ddp", "", 3, 2, [2, 4, 6, 8, 10, 12]),
        pytest.param("fsdp", "", 3, 2, [2, 4, 6, 8, 10, 12], marks=pytest.mark.slow),
        pytest.param("deepspeed", "", 3, 2, [2, 4, 6, 8, 10, 12], marks=pytest.mark.slow),
        ("ddp", "written to", 100, 100, []),  # by the audit after update 8
        ("ddp", "written to", 100, 6, []),  # by the save of step 6
        ("ddp", "written to", 5, 100, []),  # by the log of step 5
    ],
)
def test_copies_of_weights_are_compared_again_and_again(
    backend: str, fault: str, log_every: int, save_every: int, saved: list[int], tmp_path: Path
) -> None:
    options = {"shard_size": 1} if backend == "fsdp" else {}
    found = Subject(backend, 2, options).run(
        audited, fault=fault, log_every=log_every, save_every=save_every, out=str(tmp_path / "run")
    )
    for message, steps in found:
        assert steps == saved
        assert bool(message) is bool(fault)
        if fault:
            assert "copies of a weight that must be equal differ between ranks" in message
            assert "second.bias on ranks 0, 1" in message


IN_FUSED, IN_CONTEXT = "must be named in Parallel.fused", "may combine positions"


@pytest.mark.parametrize(
    ("dimension", "expected"),
    [
        (
            "tensor",
            {
                "right": "",
                "right in sequence": "",
                "fused without a name": IN_FUSED,
                "fused groups": IN_FUSED,
                "a mean over parts": IN_FUSED,
                "a gain without a name": r"gradients of blocks.0.gain, blocks.1.gain differ",
                "turns": r"gradients of second.blocks.0.gain, second.blocks.1.gain differ",
                "kept for the loss, from step 6 on": "in 'sequence' is added to the loss",
                "kept for the loss, counting nothing": "in 'sequence' is added to the loss",
            },
        ),
        (
            "context",
            {
                "right": "",
                "no positions": IN_CONTEXT,
                "attention by hand": IN_CONTEXT,
                "a mean over positions": IN_CONTEXT,
                "a convolution over positions": IN_CONTEXT,
                "a convolution that adds little": IN_CONTEXT,
            },
        ),
        (
            "pipeline",
            {
                "right": "",
                "kept for the loss, from step 6 on": "past the blocks of the last stage",
                "kept for the loss, counting nothing": "past the blocks of the last stage",
            },
        ),
    ],
)
def test_what_is_wrong_is_named_where_weights_are_zero_or_it_begins_later(
    dimension: str, expected: dict[str, str], tmp_path: Path
) -> None:
    """Compare gradients of the partitioned and the whole model at moved weights. No wrong state may
    be saved."""
    subject = Subject("mesh", 2, {dimension: 2})
    for found in subject.run(refusals, names=[*expected], out=str(tmp_path)):
        for name, (message, saved) in found.items():
            assert re.search(expected[name], message), f"{name}: {message}"
            assert bool(message) is bool(expected[name]), f"{name}: {message}"
            assert saved == ([] if message else [7, 8]), name


@pytest.mark.parametrize(
    ("dimension", "precision", "wrong"),
    [
        (
            "tensor",
            "bf16",
            {
                "fused without a name": IN_FUSED,
                "fused groups": IN_FUSED,
                "a mean over parts": IN_FUSED,
            },
        ),
        pytest.param("tensor", "fp16", {"fused without a name": IN_FUSED}, marks=pytest.mark.slow),
        pytest.param(
            "context",
            "bf16",
            {
                "no positions": IN_CONTEXT,
                "attention by hand": IN_CONTEXT,
                "a mean over positions": IN_CONTEXT,
                "a convolution over positions": IN_CONTEXT,
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_wrong_is_named_whatever_training_computes_in(
    dimension: str, precision: str, wrong: dict[str, str], tmp_path: Path
) -> None:
    """Roundings to 16 bits do not hide a mistake: the comparison is in float32."""
    subject = Subject("mesh", 2, {dimension: 2})
    names = ["right", *wrong]
    for found in subject.run(refusals, names=names, out=str(tmp_path), precision=precision):
        assert found["right"] == ("", [7, 8])
        for name, expected in wrong.items():
            message, saved = found[name]
            assert re.search(expected, message), f"{name}: {message}"
            assert not saved, name

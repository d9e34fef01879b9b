"""A run whose last evaluation, observer or sample fails loses nothing, and exits with 3."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Drive

from drivetrain.checkpoint import CheckpointReader

RECIPE = """
import os
import torch
from torch import nn
from drivetrain import Recipe, Settings
from drivetrain.run import run_folder_writer

settings = Settings(steps=6, global_batch=8, log_every=4)
fails, ranks = os.environ.get("FAILS", ""), os.environ.get("RANKS", "0 1").split()
mine = os.environ.get("RANK", "0") in ranks
calls = []


class Points:
    def __len__(self):
        return 41

    def __getitem__(self, index):
        x = torch.randn(3, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum(0, keepdim=True)}


def loss(module, batch):
    return (module(batch["x"]) - batch["y"]).square().sum()


def measure(module, batch):
    calls.append(1)
    if fails == "measure" and mine and len(calls) > 4:  # the sanity check makes fewer
        raise ValueError("no such label")
    return {"loss": loss(module, batch)}


def summarise(sums):
    if fails == "summarise" and mine and sums["samples"] > 40:
        raise KeyError("accuracy")
    return {"loss": float(sums["loss"] / sums["samples"])}


def watch(event):
    if fails == type(event).__name__ and mine and event.step == 6:
        raise ConnectionError("the server is away")


def sample(module):
    if fails == "sample" and mine:
        raise ValueError("no text")
    return "a sample"


def broken(*arguments):
    raise ZeroDivisionError("no figures")


if fails == "report":
    run_folder_writer.render = broken
recipe = Recipe(
    model=lambda: nn.Linear(3, 1),
    loss=loss,
    train_data=Points(),
    eval_data={"held": Points()},
    measure=measure,
    summarise=summarise,
)
observers = [watch]
"""


@pytest.fixture
def failing(tmp_path: Path) -> Path:
    path = tmp_path / "failing.py"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("summarise", "the last evaluation failed: KeyError: 'accuracy'"),
        ("RunEnded", "the observer watch (at RunEnded) failed: ConnectionError: the server is"),
        pytest.param("sample", "`finish` failed: ValueError: no text", marks=pytest.mark.slow),
    ],
)
def test_one_process(drive: Drive, failing: Path, tmp_path: Path, fails: str, said: str) -> None:
    ran = drive("train", failing, "--out", "run", "--backend", "cpu", FAILS=fails)
    assert ran.code == 3, ran.stderr
    assert f"saved in run/checkpoints/checkpoint-000006; then {said}" in ran.stderr
    assert 'failing.py", line' in ran.stderr
    assert "cli/" not in ran.stderr
    assert CheckpointReader(tmp_path / "run" / "checkpoints" / "checkpoint-000006").manifest
    assert "failed: FailedAfterTraining" in (tmp_path / "run" / "report.html").read_text()
    again = drive("train", "--resume", "run")
    assert again.code == 0, again.stderr
    assert ("held" in again.stdout) == (fails in ("measure", "summarise"))  # it was made else


def test_a_report_that_cannot_be_drawn_is_a_warning(
    drive: Drive, failing: Path, tmp_path: Path
) -> None:
    ran = drive("train", failing, "--out", "run", "--backend", "cpu", FAILS="report")
    assert ran.code == 0, ran.stderr
    printed = ran.stdout + ran.stderr
    assert printed.count("the report cannot be drawn: ZeroDivisionError: no figures") == 1
    assert "drivetrain report run" in printed
    assert not (tmp_path / "run" / "report.html").exists()
    assert drive("report", "run").code == 0
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", ["0 1", "1", "0"])
@pytest.mark.parametrize("fails", ["measure", "summarise", "RunEnded", "Logged", "sample"])
def test_ranks(
    drive: Drive, failing: Path, tmp_path: Path, backend: str, ranks: str, fails: str
) -> None:
    words = ("--backend", backend, "--nproc", 2)
    ran = drive("train", failing, "--out", "run", *words, FAILS=fails, RANKS=ranks)
    assert ran.code == 3, ran.stderr
    assert "saved in run/checkpoints/checkpoint-000006; then" in ran.stderr
    assert ran.stderr.count("error (rank") == 1
    assert CheckpointReader(tmp_path / "run" / "checkpoints" / "checkpoint-000006").manifest
    again = drive("train", "--resume", "run", *words)
    assert again.code == 0, again.stderr
    # rank 0 may have made the evaluation, and added it to the checkpoint, before rank 1 failed

"""`drivetrain plan`: the ways to place a run, ranked, and commands that run."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from drivetrain.cli.app import app
from drivetrain.cli.settings.plan import plan, show_plan, size_in_bytes
from drivetrain.kernel.errors import SettingError

RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from drivetrain import Recipe, Settings

settings = Settings(steps=2, global_batch=16)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


recipe = Recipe(
    model=lambda: nn.Sequential(Block(), Block()),
    loss=lambda module, batch: module(batch[0]).square().mean(1).sum(),
    train_data=TensorDataset(torch.zeros(64, 32)),
)
"""
FP32 = [("here", {"precision": "fp32"})]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "small.py"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def all_ways(recipe: Path) -> dict[str, Any]:
    """Return the ways of all drivers on two ranks of the smallest memory that some fit into."""
    whole = plan(recipe, None, FP32, 2, "h100")
    totals = sorted(each["total_bytes"] for each in whole["fits"])
    assert len({each["backend"] for each in whole["fits"]}) >= 3
    middle = totals[len(totals) // 2]
    return plan(recipe, None, FP32, 2, "h100", f"{middle / 0.9 + 1:.0f}")


def test_the_quickest_way_that_fits_is_the_first(all_ways: dict[str, Any]) -> None:
    seconds = [each["seconds"] for each in all_ways["fits"]]
    assert seconds == sorted(seconds)
    assert all(each["total_bytes"] <= all_ways["usable_bytes"] for each in all_ways["fits"])
    parts = ("compute_seconds", "memory_seconds", "network_seconds")
    for each in all_ways["fits"]:
        assert sum(each[part] for part in parts) == pytest.approx(each["seconds"])
        assert sum(each["bytes"].values()) == each["total_bytes"]
        assert set(each["sent_bytes"]) == {"machine", "network"}


def test_the_others_have_reasons(all_ways: dict[str, Any]) -> None:
    too_large = [each for each in all_ways["left_out"] if each["needed_bytes"]]
    assert too_large
    assert all(each["needed_bytes"] > all_ways["usable_bytes"] for each in too_large)
    assert all(each["reason"] for each in all_ways["left_out"])
    assert any("pipeline" in each["reason"] for each in all_ways["left_out"])


@pytest.mark.parametrize("width", [80, 200])
def test_it_is_shown(all_ways: dict[str, Any], width: int) -> None:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show_plan(all_ways, 2, console)
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]
    lines = shown.splitlines()
    assert max(map(len, lines[:-1])) <= width
    assert lines[-1] == all_ways["fits"][0]["command"]
    assert f"{len(all_ways['fits']) - 2} more fit: --top shows them" in lines
    assert "not fit; the smallest, " in " ".join(lines)


def test_the_command_of_a_way_runs(all_ways: dict[str, Any], recipe: Path, tmp_path: Path) -> None:
    command = shlex.split(all_ways["fits"][0]["command"])
    assert command[:3] == ["drivetrain", "train", str(recipe)]
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain.cli", *command[1:], "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["backend"] == all_ways["fits"][0]["backend"]


@pytest.mark.parametrize(("ranks", "in_machine"), [(16, 8), (12, 6)])
def test_several_machines_are_started_by_torchrun(
    recipe: Path, ranks: int, in_machine: int
) -> None:
    found = plan(recipe, "ddp", FP32, ranks, "h100")
    words = shlex.split(found["fits"][0]["command"])
    assert words[:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", str(in_machine)]
    assert found["fits"][0]["sent_bytes"]["network"] > 0


def test_what_is_given_is_not_varied(recipe: Path) -> None:
    values = {"precision": "bf16", "micro_batch": "2", "backend.stage": "2"}
    found = plan(recipe, "deepspeed", [("here", values)], 2, "a100")
    (way,) = found["fits"]
    assert (way["settings"]["precision"], way["settings"]["micro_batch"]) == ("bf16", 2)
    assert way["options"] == {"stage": 2}
    assert "--set micro_batch=2" in way["command"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world", "2", "--memory", "much"], "memory 'much' is no size"),
        (["--world", "2", "--device", "abacus"], "device 'abacus' is not known"),
        (["--world", "0"], "greater than or equal to 1"),
        (["--world", "2", "--backend", "fsp"], "fsdp"),
        (["--world", "2", "--set", "presicion=bf16"], "precision"),
        ([], "Missing option '--world'"),
    ],
)
def test_nonsense_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_a_driver_that_is_asked_for_and_lists_nothing_says_so(recipe: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(recipe), "--world", "1", "--backend", "cpu"])
    assert result.exit_code == 0
    assert "None fits." in result.output
    assert "cpu: does not list ways to place a model on accelerators" in result.output


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80e9), ("141 GiB", 141 * 2**30), ("1.5tb", 1.5e12), ("512", 512), ("3kB", 3000)],
)
def test_sizes_have_units(text: str, size: float) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0GB", "1e9", "80 Gbit", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="is no size; give a number and a unit, such as 80GB"):
        size_in_bytes(text)

"""`drivetrain replay` and `drivetrain compare`: a step is trained again and compared, and the first
difference of two runs is named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import Drive

from drivetrain.data.order import shuffled

TRAIN = ("--backend", "cpu", "--set", "checkpoint.every=2", "--set", "checkpoint.keep_last=9")


def everything(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return the content and the time of each file, and the time of each folder."""
    return {
        str(path): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in [folder, *folder.rglob("*")]
    }


def test_a_step_is_replayed_bit_for_bit(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    assert drive("train", recipe, *TRAIN, "--out", "run").code == 0
    before = everything(tmp_path / "run")
    ran = drive("replay", "run", "--step", "6", "--json")
    assert ran.code == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["equal"], found["exact"], found["compared_steps"]) == (True, True, [6])
    assert found["checkpoint"].endswith("checkpoint-000004")
    words = ("--set", "optimizer.lr=0.01", "--dump", "dump")
    ran = drive("replay", "run", "--step", "4", "--set", "micro_batch=3", *words)
    assert ran.code == 1, ran.stderr
    assert "part at step 4: learning rate" in ran.stdout
    assert "optimizer.lr: 0.001 and 0.01" in ran.stdout
    dump = json.loads((tmp_path / "dump" / "step-000004-rank-0.json").read_text())
    assert dump["samples"].startswith("samples 12 to 15 of epoch 0 (")
    assert sum(dump["microbatch_losses"]) / 4 == pytest.approx(dump["loss"])
    assert sorted(dump["gradient_norms"]) == sorted(dump["weight_norms"])
    ran = drive("replay", "run", "--step", "4", "--save", "run")
    assert ran.code == 2 and "--save run is there already" in ran.stderr
    assert everything(tmp_path / "run") == before


@pytest.mark.slow
def test_a_step_before_a_resume_is_replayed_with_the_settings_that_made_it(
    drive: Drive, recipe: Path
) -> None:
    """More steps stretch the schedule of learning rates; the steps before had the shorter one."""
    words = ("--set", "log_every=1", "--out", "run")
    assert drive("train", recipe, *TRAIN, "--steps=6", *words).code == 0
    longer = ("--steps=10", "--set", "optimizer.lr=0.003", "--resume", "auto")
    assert drive("train", recipe, *TRAIN, *longer, *words).code == 0
    for step in (6, 10):
        ran = drive("replay", "run", "--step", str(step), "--json")
        assert (ran.code, json.loads(ran.stdout)["equal"]) == (0, True), ran.stdout
    ran = drive("replay", "run", "--step", "6", "--set", "optimizer.lr=0.003")
    assert "part at step 5: learning rate" in ran.stdout


@pytest.mark.slow
def test_a_rate_that_follows_a_metric_is_replayed(drive: Drive, recipe: Path) -> None:
    falling = {"name": "plateau", "metric": "held_out.loss", "patience": 1, "min_change": 1e9}
    words = [f"--set=schedule.{name}={value}" for name, value in falling.items()]
    train = (*TRAIN, *words, "--set=evaluate.every=1", "--set=log_every=1")
    assert drive("train", recipe, *train, "--out", "run").code == 0
    ran = drive("replay", "run", "--step", "6", "--json")
    assert (ran.code, json.loads(ran.stdout)["equal"]) == (0, True), ran.stdout


@pytest.mark.slow
def test_what_was_changed_is_named(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    """A step is replayed without a checkpoint, from changed data, and from changed weights."""
    drive("train", recipe, *TRAIN, "--set", "log_every=1", "--out", "run")
    ran = drive("replay", "run", "--step", "2", "--json")
    assert (ran.code, json.loads(ran.stdout)["checkpoint"]) == (0, None)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (weights,) = (tmp_path / "copy" / "checkpoints" / "checkpoint-000004").glob("weights*")
    raw = bytearray(weights.read_bytes())
    raw[-2] ^= 0x40  # a bit of the last number's mantissa
    weights.write_bytes(raw)
    ran = drive("replay", "copy", "--step", "6")
    assert ran.code == 2
    assert "checkpoint-000004" in ran.stderr
    ran = drive("replay", "copy", "--step", "6", "--set", "checkpoint.verify=false", "--json")
    found = json.loads(ran.stdout)
    assert (ran.code, found["first"]["step"]) == (1, 5)
    assert "weight 1.weight" in [each["quantity"] for each in found["differences"]]
    (index,) = shuffled(40, 0, 0)[18:19]  # the third sample of step 5
    made = "self.x = torch.randn(count, 3, generator=generator)"
    assert made in recipe.read_text()
    changed = f"{made}\n        self.x[min({int(index)}, count - 1)] += 1"
    recipe.write_text(recipe.read_text().replace(made, changed))
    ran = drive("replay", "run", "--step", "6")
    assert ran.code == 1, ran.stderr
    assert "part at step 5: samples (2 of 4 in the global batch, counted from 0)" in ran.stdout


@pytest.mark.slow
def test_a_run_of_two_ranks_is_replayed(drive: Drive, recipe: Path) -> None:
    """On the same driver bit for bit, on another within rounding."""
    two = ("--backend", "ddp", "--nproc", "2", "--set", "backend.device=cpu")
    ran = drive("train", recipe, *TRAIN, *two, "--out", "run")
    assert ran.code == 0, ran.stderr
    ran = drive("replay", "run", "--step", "6")
    assert ran.code == 0, ran.stderr
    assert "equal bit for bit" in ran.stdout
    ran = drive("replay", "run", "--step", "6", "--backend", "cpu", "--json")
    found = json.loads(ran.stdout)
    assert (ran.code, found["exact"]) == (0, False)
    assert found["conditions"][0] == {"name": "backend", "first": "ddp", "second": "cpu"}
    ran = drive("replay", "run", "--step", "6", "--backend", "cpu", "--set", "micro_batch=1")
    assert ran.code == 0, ran.stdout
    ran = drive("replay", "run", "--step", "6", "-b", "cpu", "--set", "optimizer.lr=0.01")
    assert ran.code == 1
    ran = drive("replay", "run", "--step", "6", "--set", "optimizer.lr=0.01")
    assert (ran.code, ran.stderr) == (1, ""), ran.stderr


@pytest.mark.slow
def test_two_runs_are_compared(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    drive("train", recipe, *TRAIN, "--out", "a")
    drive("train", recipe, *TRAIN, "--out", "b", "--seed", "1")
    assert drive("compare", "a", "a").code == 0
    ran = drive("compare", "a", "b", "--json")
    assert ran.code == 1, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    assert found["first"]["step"] == 1
    assert {"name": "seed", "first": "0", "second": "1"} in found["conditions"]
    ran = drive("replay", "a", "--step", "2", "--against", "b")
    assert ran.code == 1
    assert "a and b part at step 1: loss" in ran.stdout


@pytest.mark.slow
def test_what_cannot_be_replayed_is_refused(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    drive("train", recipe, *TRAIN, "--out", "run")
    for arguments, words in (
        (("replay", "run", "--step", "5"), "the nearest that it has are 4 and 6"),
        (("replay", "none", "--step", "2"), "none is not a folder"),
        (("replay", "run", "--step", "2", "--against", "none"), "none is not a folder"),
        (("compare", "run", "none"), "none is no run folder"),
    ):
        ran = drive(*arguments)
        assert ran.code == 2, (arguments, ran.stderr)
        assert words in ran.stderr
    drive("train", recipe, *TRAIN, "--set", "digests=none", "--out", "without")
    ran = drive("replay", "without", "--step", "6")
    assert (ran.code, "digests=weights" in ran.stderr) == (2, True)
    drive("train", "--resume", "run", "--steps", "8", "--out", "later")
    shutil.rmtree(tmp_path / "later" / "checkpoints")
    os.mkdir(tmp_path / "later" / "checkpoints")
    ran = drive("replay", "later", "--step", "8")
    assert (ran.code, "no checkpoint before step 8" in ran.stderr) == (2, True)

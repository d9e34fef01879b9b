"""`drivetrain evaluate`: checkpoints are evaluated on another driver, and as soon as they are
saved.
"""

from __future__ import annotations

import json
import shutil
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from command_line import Drive

from drivetrain import evaluate
from drivetrain.cli.settings.recipe_file import load_recipe_file


def evaluated(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == "evaluated"]


TRAIN = ("--backend", "cpu", "--set", "checkpoint.every=2", "--set", "checkpoint.keep_last=9")


def test_a_checkpoint_measures_as_in_training(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    drive("train", recipe, *TRAIN, "--set", "evaluate.every=2", "--out", "run")
    in_training = evaluated(tmp_path / "run")
    assert [record["step"] for record in in_training] == [2, 4, 6]
    ran = drive("evaluate", "run", "--all", "--backend", "ddp", "--json")
    assert ran.code == 0, ran.stderr
    again = ran.records()
    assert [record["step"] for record in again] == [2, 4, 6]
    for then, now in zip(in_training, again, strict=True):
        assert now["evaluated_on"] == "ddp"
        assert now["metrics"] == pytest.approx(then["metrics"], rel=1e-6)
    assert evaluated(tmp_path / "run") == [*in_training, *again]
    newest = drive("evaluate", "run", "--json").records()
    assert [record["step"] for record in newest] == [6]
    one = drive("evaluate", "run/checkpoints/checkpoint-000004", "--json").records()
    assert [record["step"] for record in one] == [4]
    loaded = load_recipe_file(recipe)
    built = loaded.build(loaded.config)
    metrics = evaluate(built, tmp_path / "run", backend="cpu")
    assert metrics["held_out"] == pytest.approx(newest[0]["metrics"])


@pytest.mark.slow
def test_each_checkpoint_is_measured_as_it_comes(
    drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    """Follow a run that trains its second half. The follower ends with the run."""
    drive("train", recipe, *TRAIN, "--steps", "2", "--out", "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if '"run_ended"' not in line]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(kept) + "\n")  # the run has not ended
    came: list[int] = []

    def end_the_run(follower: BaseProcess) -> None:
        until(lambda: evaluated_elsewhere(tmp_path / "run") == [2], follower)
        came.append(drive_beside(drive, recipe, tmp_path))

    ran = drive("evaluate", "run", "--follow", "--seconds", "0.1", meanwhile=end_the_run)
    assert came == [0]
    assert ran.code == 0, ran.stderr
    assert evaluated_elsewhere(tmp_path / "run") == [2, 4, 6]
    again = drive("evaluate", "run", "--follow", "--seconds", "0.1", "--json")
    assert (again.code, again.records()) == (0, []), "all had been measured"


def drive_beside(drive: Drive, recipe: Path, folder: Path) -> int:
    """Return a function that runs another command, in a separate folder so that outputs
    do not mix.
    """
    import subprocess
    import sys

    words = ("train", recipe, *TRAIN, "--resume", "auto", "--out", "run")
    command = [sys.executable, "-m", "drivetrain.cli", *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode


def evaluated_elsewhere(run: Path) -> list[int]:
    return [record["step"] for record in evaluated(run) if "evaluated_on" in record]


def until(holds: Any, process: BaseProcess) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.05)


def test_what_cannot_be_measured_is_refused(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert drive("evaluate", "empty").code == 2
    drive("train", recipe, *TRAIN, "--out", "run")
    bare = tmp_path / "bare.py"
    bare.write_text(recipe.read_text().replace('eval_data={"held_out": Points(8)},', ""))
    ran = drive("evaluate", "run", bare)
    assert ran.code == 2 and "eval_data" in ran.stderr
    wrong = drive("evaluate", "run", "--set", "recipe.width=9")
    assert wrong.code == 2 and "0.weight" in wrong.stderr
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-000004")
    assert drive("evaluate", "run", "--all", "--json").code == 0


@pytest.mark.slow
def test_ranks_share_the_work(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    drive("train", recipe, *TRAIN, "--out", "run")
    ran = drive("evaluate", "run", "--backend", "fsdp", "--nproc", "2", "--json")
    assert ran.code == 0, ran.stderr
    (here,) = drive("evaluate", "run", "--backend", "cpu", "--json").records()
    records = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert [record["metrics"] for record in records] == [pytest.approx(here["metrics"], rel=1e-6)]

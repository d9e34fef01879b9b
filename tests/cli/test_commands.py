"""The smaller commands of the command line."""

from __future__ import annotations

import json
import os
import pydoc
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import Drive
from typer.testing import CliRunner

import drivetrain
from drivetrain.cli.app import app
from drivetrain.cli.process.launch import Launch
from drivetrain.launched import adopt_slurm


def commands(command: Any) -> Iterator[Any]:
    below = getattr(command, "commands", {}).values()
    yield from (leaf for each in below for leaf in commands(each))
    if not below:
        yield command


def test_each_command_reports_errors_and_can_be_debugged() -> None:
    found = list(commands(typer.main.get_command(app)))
    assert len(found) > 15
    assert not [each.name for each in found if "debug" not in {p.name for p in each.params}]


def test_the_version_is_shown(drive: Drive) -> None:
    ran = drive("--version")
    assert (ran.code, ran.stdout.strip()) == (0, f"drivetrain {drivetrain.__version__}")


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("train --backend d", ["ddp", "deepspeed"]),
        ("train --set optimizer.l", ["optimizer.lr=", "optimizer.layer_decay="]),
        ("explain --set backend.sta", ["backend.static_graph=", "backend.stage="]),
    ],
)
def test_a_shell_completes(words: str, completed: list[str], drive: Drive) -> None:
    line = f"drivetrain {words}"
    ran = drive(
        _DRIVETRAIN_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(line.count(" "))
    )
    assert {*completed} <= {*ran.stdout.split()}
    assert all(word.startswith(words.rsplit(maxsplit=1)[-1]) for word in ran.stdout.split())


def test_backends(drive: Drive) -> None:
    records = json.loads(drive("backends", "--json").stdout)
    cpu = records[0]
    assert (cpu["name"], cpu["usable"]) == ("cpu", True)
    assert "fp32" in cpu["capabilities"]["precisions"]
    assert "torch" in cpu["versions"]
    table = drive("backends", COLUMNS="200").stdout
    assert all(record["name"] in table for record in records)


def test_checkpoints(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    trained = drive("train", recipe, "--out", "run").stdout
    shown = drive("checkpoint", "inspect", "run", COLUMNS="120").stdout
    assert "step 6, written by cpu" in shown
    best = re.search(r"best checkpoint: step 6, loss ([0-9.]+): run@best", trained)
    assert best is not None, trained
    assert f"best checkpoint: step 6, loss {best[1]}: run/checkpoints/checkpoint-000006" in shown
    text = (tmp_path / "run/report.html").read_text()
    assert f"<dt>Best checkpoint</dt><dd>step 6, loss {best[1]}</dd>" in text
    assert "run@best" in text and "Memory of the process (bytes)" in text
    assert "0.weight" in shown
    record = json.loads(drive("checkpoint", "inspect", "run", "--json").stdout)
    assert record["tensors"]["weights"]["0.weight"] == {"dtype": "float32", "shape": [4, 3]}
    assert (record["best"]["step"], record["best"]["name"]) == (6, "run@best")
    assert json.loads(drive("checkpoint", "inspect", "run@best", "--json").stdout)["best"] is None

    assert drive("checkpoint", "export", "run", "exported").code == 0
    assert (tmp_path / "exported/model.safetensors").is_file()
    assert drive("checkpoint", "import", "exported", "imported").code == 0
    resumed = drive("train", recipe, "--resume", "imported/checkpoints", "--out", "second")
    assert resumed.code == 0, resumed.stderr
    assert "resumed at step 0" in resumed.stdout

    averaged = drive("checkpoint", "average", "run", "second", "--out", "averaged")
    assert "the mean of 2 checkpoints written to averaged/" in averaged.stdout, averaged.stderr
    assert drive("checkpoint", "export", "averaged", "exported-mean").code == 0
    none = drive("checkpoint", "export", "run", "not-there", "--weights", "average")
    assert (none.code, "holds no averages of weights" in none.stderr) == (2, True)

    whole = drive("checkpoint", "verify", "run")
    assert whole.code == 0
    assert "complete and unaltered" in whole.stdout
    damaged = next((tmp_path / "run/checkpoints/checkpoint-000006").glob("weights-*"))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    broken = drive("checkpoint", "verify", "run")
    assert broken.code == 1
    assert damaged.name in broken.stderr


def test_no_checkpoint(drive: Drive, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for command in ("inspect", "verify"):
        ran = drive("checkpoint", command, "empty")
        assert ran.code == 2
        assert "empty" in ran.stderr


def test_conform_refuses_what_it_does_not_know(drive: Drive) -> None:
    ran = drive("conform", "--backend", "cup")
    assert ran.code == 2
    assert "Did you mean 'cpu'?" in ran.stderr


def test_conform_hands_on_what_the_suite_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 69)

    monkeypatch.setattr(subprocess, "run", run)
    words = "conform --backend cpu --backend-set threads=2 --peer cpu --peer ddp:2 --nproc 1"
    more = ["--allow-unavailable", "-k", "a b", "--", "-x", "--tb=short"]
    assert CliRunner().invoke(app, [*words.split(), *more]).exit_code == 69
    assert ran[0][2:] == [
        "drivetrain.conformance",
        "--backend=cpu",
        "--nproc=1",
        "--backend-set=threads=2",
        "--peer=cpu",
        "--peer=ddp:2",
        "--allow-unavailable",
        "-k",
        "a b",
        "-x",
        "--tb=short",
    ]


def helps() -> dict[str, str]:
    rooms = [room.typer_instance for room in app.registered_groups]
    commands = [command for room in rooms if room for command in room.registered_commands]
    assert len(commands) >= 9
    return {
        command.callback.__name__: str(command.epilog) for command in commands if command.callback
    }


@pytest.mark.parametrize("help_of", helps().values(), ids=helps())
def test_each_command_names_what_does_the_same_in_python(help_of: str) -> None:
    names = re.findall(r"drivetrain(?:\.\w+)+", help_of.partition("From Python")[2])
    assert names
    for name in names:
        assert pydoc.locate(name) is not None, name


def test_names_in_the_readme_exist() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    names = set(re.findall(r"`(drivetrain(?:\.\w+)+)`", text))
    assert {"drivetrain.fit", "drivetrain.conformance.cases"} <= names
    for name in names:
        assert pydoc.locate(name) is not None, name


def test_flags_for_torchrun() -> None:
    assert Launch(2).flags() == ["--nproc-per-node=2", "--standalone"]
    many = Launch(8, "2", {"rdzv-endpoint": "host:1234"})
    assert many.flags() == ["--nproc-per-node=8", "--nnodes=2", "--rdzv-endpoint=host:1234"]
    assert not Launch(1).wanted


def test_slurm_tasks_are_ranks() -> None:
    environment = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "41234",
        "SLURM_JOB_NODELIST": "node7",
    }
    adopt_slurm(environment)
    assert environment["RANK"] == "3"
    assert environment["WORLD_SIZE"] == "4"
    assert environment["LOCAL_RANK"] == "1"
    assert environment["MASTER_ADDR"] == "node7"
    assert environment["MASTER_PORT"] == "13234"


@pytest.mark.parametrize(
    "others",
    [
        {"SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"},
        {"SLURM_NTASKS": "4"},
        {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
    ],
    ids=["one task", "a batch script", "an interactive shell"],
)
def test_a_single_process_of_an_allocation_is_no_rank(others: dict[str, str]) -> None:
    alone = {"SLURM_PROCID": "0", **others}
    adopt_slurm(alone)
    assert "RANK" not in alone


def test_folders_whose_names_are_no_text_and_links_that_lead_nowhere(
    drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    first, second = (os.fsdecode(b"run-\xff" + end) for end in (b"1", b"2"))
    assert drive("train", recipe, "--out", first).code == 0
    shutil.copytree(tmp_path / first, tmp_path / second)
    verified = drive("checkpoint", "verify", first)
    assert verified.code == 0 and "complete and unaltered" in verified.stdout
    assert drive("report", first, second).code == 0
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for out in ("a", "a/run"):
        ran = drive("train", recipe, "--out", out)
        assert ran.code == 2 and "Traceback" not in ran.stderr
        assert ran.stderr.startswith("error: ") and "give another" in ran.stderr


def test_the_best_evaluation_is_named_where_no_checkpoint_has_it(
    drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    """Let the loss grow from the first evaluation on."""
    worse = ["--set", "optimizer.lr=1.0", "--set", "evaluate.every=1", "--set", "log_every=1"]
    trained = drive("train", recipe, "--out", "run", *worse)
    assert trained.code == 0, trained.stderr
    named = r"best evaluation: step (\d), loss ([0-9.]+), which no checkpoint records; "
    best = re.search(
        named + r"checkpoint.save_best=true .*\nbest checkpoint: step 6", trained.stdout
    )
    assert best is not None, trained.stdout
    shown = drive("checkpoint", "inspect", "run", COLUMNS="200").stdout
    assert best[0].splitlines()[0] in shown
    assert best[0].splitlines()[0] in (tmp_path / "run/report.html").read_text()
    record = json.loads(drive("checkpoint", "inspect", "run", "--json").stdout)
    assert record["unsaved_best"]["step"] == int(best[1]) < 6
    assert record["unsaved_best"]["value"] < record["best"]["value"]

    kept = drive("train", recipe, "--out", "kept", *worse, "--set", "checkpoint.save_best=true")
    assert f"best checkpoint: step {best[1]}, loss {best[2]}: kept@best" in kept.stdout
    assert "best evaluation" not in kept.stdout

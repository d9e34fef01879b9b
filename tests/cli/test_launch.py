"""What `drivetrain launch` writes: checked against schemas, and run here as a cluster would."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from drivetrain.cli.app import app
from drivetrain.cli.jobs.job import job_of
from drivetrain.cli.jobs.kubernetes import manifest, to_yaml

yaml = pytest.importorskip("yaml")

RECIPE = """
import os, signal
from pathlib import Path
import torch
from drivetrain import CheckpointSettings, DataSettings, Recipe, Settings

class Data:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 40 and not Path("interrupted").exists():
            Path("interrupted").touch()
            {interrupt}
        return torch.ones(2)

recipe = Recipe(
    model=lambda: torch.nn.Linear(2, 1),
    loss=lambda module, batch: module(batch).square().sum(),
    train_data=Data(),
)
settings = Settings(
    global_batch=8,
    data=DataSettings(shuffle=False),
    checkpoint=CheckpointSettings(every=2),
    log_every=1,
)
"""

FAKE_SRUN = """#!/usr/bin/env bash
# as Slurm does: the command once a node, all at the same time; the largest exit code
SLURM_NTASKS=$NODES; export SLURM_NTASKS
for node in $(seq 0 $((NODES - 1))); do SLURM_PROCID=$node "$@" & pids="$pids $!"; done
worst=0
for pid in $pids; do
    wait "$pid"; code=$?
    if [ "$code" -gt "$worst" ]; then worst=$code; fi
done
exit "$worst"
"""
FAKE_SCONTROL = """#!/usr/bin/env bash
if [ "$1" = requeue ]; then echo "$2" >> requeued; else echo 127.0.0.1; echo elsewhere; fi
"""


def launched(*words: str, code: int = 0) -> str:
    """What `drivetrain launch ...` prints."""
    done = CliRunner().invoke(app, ["launch", *words])
    assert done.exit_code == code, done.output
    return done.output


def recipe(folder: Path, interrupt: str) -> Path:
    path = folder / "my.py"
    path.write_text(RECIPE.format(interrupt=interrupt))
    return path


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def events(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def assert_went_on(out: Path) -> None:
    """The run was interrupted, resumed from a checkpoint, and finished."""
    (resumed,) = [event for event in events(out) if event["event"] == "resumed"]
    assert resumed["step"] >= 2
    ended = [event for event in events(out) if event["event"] == "run_ended"]
    assert (ended[-1]["reason"], ended[-1]["step"]) == ("finished", 8)


# --- Slurm ------------------------------------------------------------------------------------


def test_the_script_for_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--nodes", "2", "--nproc", "4", "--gpus", "4", "--time", "1h30m", "--grace", "3m"]
    launched("slurm", *words, "--sbatch", "partition=big", "--", "my.py", "--out", "runs/a b")
    text = (tmp_path / "a-b.sbatch").read_text()
    lines = text.splitlines()
    assert [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")] == [
        "job-name=a-b",
        "nodes=2",
        "ntasks-per-node=1",
        "gpus-per-node=4",
        "time=90",
        "signal=TERM@180",
        "requeue",
        "open-mode=append",
        "output=%x-%j.log",
        "partition=big",
    ]
    (command,) = [line for line in lines if line.startswith("srun ")]
    assert "train my.py --out 'runs/a b' --resume auto --nproc 4 --nnodes 2 " in command
    assert '--rdzv-endpoint "$host:29400"' in command
    subprocess.run(["bash", "-n", "a-b.sbatch"], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_slurm_puts_an_interrupted_job_back(
    nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)")
    program(tmp_path, "srun", FAKE_SRUN)
    program(tmp_path, "scontrol", FAKE_SCONTROL)
    program(tmp_path, "sbatch", '#!/usr/bin/env bash\necho "Submitted batch job 7: $1"\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("DRIVETRAIN_PROGRAM", f"{sys.executable} -m drivetrain.cli")
    backend = ["--backend", "ddp"] if nodes > 1 else ["--backend", "cpu"]
    words = ["slurm", "--nodes", str(nodes), "--submit", "--", "my.py", *backend, "--out", "run"]
    assert "Submitted batch job 7: run.sbatch" in launched(*words)
    environment = {
        **os.environ,
        "NODES": str(nodes),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n",
    }
    for start, code in enumerate((75, 0)):
        done = subprocess.run(
            ["bash", "run.sbatch"],
            env={**environment, "SLURM_RESTART_COUNT": str(start)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert Path("requeued").read_text() == "7\n"
    assert_went_on(tmp_path / "run")


# --- Kubernetes -------------------------------------------------------------------------------


def jobset(*arguments: str, nodes: int = 2, **options: Any) -> dict[str, Any]:
    job = job_of(["my.py", *arguments], None, nodes, 2)
    chosen = {"gpus": 1, "claim": "runs:/runs", "grace": 60, "max_restarts": 2, **options}
    return manifest(job, "registry/my:1", **chosen)


def test_a_jobset_is_what_its_schema_says() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    made = jobset("--out", "/runs/My Run", "--set", "optimizer.lr=3e-4")
    read = models.JobsetV1alpha2JobSet.from_dict(made)
    assert read.to_dict() == made  # what it does not know, it leaves out
    wrong = json.loads(json.dumps(made).replace("completionMode", "completeMode"))
    assert models.JobsetV1alpha2JobSet.from_dict(wrong).to_dict() != wrong
    spec = read.spec.replicated_jobs[0].template.spec
    assert spec.pod_failure_policy.rules[0].on_exit_codes.values == [75]
    assert "my-run-node-0-0.my-run:29400" in spec.template.spec.containers[0].command


def test_the_manifest_is_yaml() -> None:
    made = jobset("--out", "/runs/a", "--set", 'recipe.text=": # {[\'"')
    assert yaml.safe_load(to_yaml(made)) == made
    others = {"a": [], "b": {}, "c": [[1, 2], {"d": None}], "e": [{"f": [1, 2]}]}
    assert yaml.safe_load(to_yaml(others)) == others


@pytest.mark.slow
def test_the_command_of_a_pod_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)")
    claim = f"runs:{tmp_path}"
    made = jobset("--out", str(tmp_path / "run"), "--backend", "ddp", nodes=1, claim=claim)
    pod = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    command[0] = str(Path(sys.executable).parent / command[0])
    codes = [subprocess.run(command, capture_output=True, check=False).returncode for _ in "12"]
    assert codes == [75, 0]
    assert_went_on(tmp_path / "run")


# --- Ray --------------------------------------------------------------------------------------


def test_the_file_for_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--workers", "2", "--max-restarts", "1", "--json", "--", "my.py", "--out", "runs/a"]
    told = json.loads(launched("ray", *words))
    assert told["file"] == "a_ray.py"
    text = (tmp_path / "a_ray.py").read_text()
    given: dict[str, Any] = {}
    body = text.replace("from drivetrain.cli.jobs.ray_workers import train", "")
    names = {"__name__": "__main__", "train": lambda words, **more: given.update(more, words=words)}
    exec(compile(body, "a_ray.py", "exec"), names)
    assert given["words"] == ["my.py", "--out", "runs/a", "--resume", "auto"]
    assert (given["workers"], given["gpus"], given["max_restarts"]) == (2, 0, 1)


@pytest.mark.slow
@pytest.mark.timeout(1000)  # Ray starts a dozen processes, twice, beside what else is tested
def test_ray_goes_on_when_a_worker_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray.train")
    monkeypatch.chdir(tmp_path)
    recipe(tmp_path, "os.kill(os.getppid(), signal.SIGKILL)")  # the worker that started the rank
    words = ["--workers", "2", "--max-restarts", "1", "--", "my.py", "--backend", "ddp"]
    launched("ray", *words, "--set", "stall_seconds=none", "--out", "run")
    environment = {
        "HOME": str(tmp_path),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # its 15 would starve the ranks where other tests compute
    }
    done = subprocess.run(
        [sys.executable, "run_ray.py"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert_went_on(tmp_path / "run")


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["slurm", "--", "my.py"], "--out"),
        (["slurm", "--", "my.py", "--out", "a", "--stepz", "3"], "--stepz"),
        (["slurm", "--", "my.py", "--out", "a", "--nproc", "3"], "--nproc"),
        (["slurm", "--time", "soon", "--", "my.py", "--out", "a"], "--time"),
        (["slurm", "--submit", "--", "my.py", "--out", "a"], "sbatch"),
        (["kubernetes", "--image", "i", "--", "my.py", "--out", "/runs/a"], "--claim"),
        (
            ["kubernetes", "--image", "i", "--claim", "c", "--", "my.py", "--out", "/a"],
            "NAME:/path",
        ),
        (["kubernetes", "--image", "i", "--claim", "c:/b", "--", "my.py", "--out", "/a"], "/b"),
        (["kubernetes", "--image", "i", "--submit", "--", "m.py", "--out", "s3://b/a"], "kubectl"),
        (
            ["kubernetes", "--image", "i", "--name", "...", "--", "m.py", "--out", "s3://b"],
            "--name",
        ),
        (["ray", "--submit", "--", "my.py", "--out", "a"], "ray"),
    ],
)
def test_what_cannot_be_had_is_refused(
    words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert why in launched(*words, code=2)

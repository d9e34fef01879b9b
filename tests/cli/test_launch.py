"""Files that `drivetrain launch` writes, checked by schemas, and run here as on a cluster."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from drivetrain.cli.app import app
from drivetrain.cli.commands.train import parse_arguments
from drivetrain.cli.jobs import slurm
from drivetrain.cli.jobs.job import Job, job_of
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
SLURM_NTASKS=$NODES SLURM_STEP_ID=0; export SLURM_NTASKS SLURM_STEP_ID
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


HOSTILE = (
    "$host:$(touch PWN)",
    "`touch PWN`",
    '"; touch PWN; "',
    "'; touch PWN; '",
    "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}",
    "\n#SBATCH --exclusive\ntouch PWN\n",
    "$(HOSTNAME)$$(HOSTNAME)$$$ $",
    "\\ud83d\U0001f600\ufeff\u2028\x85\x7f\x1b",
    "{{ a }}: &a *a # - !!python/object",
    "~ * ? [a] -x",
)
ANY_TEXT = st.lists(
    st.one_of(
        st.sampled_from(HOSTILE),
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    ),
    min_size=1,
    max_size=4,
).map("".join)
ANY_WORDS = st.lists(ANY_TEXT, min_size=1, max_size=5)


SOME = """
from dataclasses import dataclass
from drivetrain import Recipe

@dataclass(frozen=True)
class Config:
    text: str = ""

def recipe(config: Config) -> Recipe: ...
"""


@pytest.fixture(autouse=True)
def in_a_folder_with_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(SOME)


def launched(*words: str, code: int = 0) -> str:
    """Return the output of `drivetrain launch ...`."""
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
    """Require that the run was interrupted, resumed from a checkpoint, and finished."""
    (resumed,) = [event for event in events(out) if event["event"] == "resumed"]
    assert resumed["step"] >= 2
    ended = [event for event in events(out) if event["event"] == "run_ended"]
    assert (ended[-1]["reason"], ended[-1]["step"]) == ("finished", 8)


# --- Slurm ------------------------------------------------------------------------------------


def test_the_script_for_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def as_bash_runs(text: str, folder: Path) -> list[str]:
    """Return the words that the script gives to `srun`."""
    program(folder, "srun", """#!/usr/bin/env bash\nprintf '%s\\0' "$@"\n""")
    program(folder, "scontrol", FAKE_SCONTROL)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "host": "wrong"}
    raw = text.encode(errors="surrogateescape")
    done = subprocess.run(
        ["bash"], input=raw, env=environment, cwd=folder, capture_output=True, check=True
    )
    assert not (folder / "PWN").exists()
    return [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]


def test_no_word_of_a_job_is_run_by_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRIVETRAIN_PROGRAM", "drivetrain")
    for number, text in enumerate((*HOSTILE, "caf\udce9")):
        words = ["my.py", "--out", text, "--set", f"recipe.text={text}"]
        launched("slurm", "--nodes", "2", "--name", f"job{number}", "--", *words)
        script = Path(f"job{number}.sbatch").read_bytes().decode(errors="surrogateescape")
        ran = as_bash_runs(script, tmp_path)
        assert ran[:7] == ["drivetrain", "train", *words]
        assert ran[-4:] == ["--rdzv-endpoint", "127.0.0.1:29400", "--rdzv-id", "7-0"]
    printed = launched("slurm", "--file", "$(touch PWN)", "--", "my.py", "--out", "a")
    assert shlex.split(printed)[-2:] == ["sbatch", "$(touch PWN)"], "what is printed can be pasted"


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(words=ANY_WORDS, option=ANY_TEXT.map(lambda text: text.replace("\n", "")))
def test_any_words_reach_the_program_through_bash(
    words: list[str], option: str, tmp_path: Path
) -> None:
    job = Job("a", tuple(words), "a", nodes=2)
    given: dict[str, Any] = {"seconds": None, "grace": 60, "gpus": 0}
    text = slurm.script(job, ["drivetrain"], **given, options=[f"comment={option}"])
    ran = as_bash_runs(text, tmp_path)
    assert ran[2 : 2 + len(words)] == words
    (line,) = [line for line in text.split("\n") if line.startswith("#SBATCH --comment=")]
    assert as_sbatch_reads(line.removeprefix("#SBATCH ")) == f"--comment={option}"


def as_sbatch_reads(line: str) -> str:
    """Return the first option of a line by sbatch's rules: quotes, and backslashes everywhere."""
    found, quote, escaped = [], "", False
    for character in line:
        if escaped:
            found.append(character)
            escaped = False
        elif character == "\\":
            escaped = True
        elif quote and character == quote:
            quote = ""
        elif not quote and character in "\"'":
            quote = character
        elif not quote and (character.isspace() or character == "#"):
            break
        else:
            found.append(character)
    return "".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_slurm_puts_an_interrupted_job_back(
    nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    words = ["my.py", *arguments]
    job = job_of(words, parse_arguments(words), None, nodes, 2, here=False)
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


def as_the_kubelet_expands(word: str) -> str:
    """Expand variables by the rules of `k8s.io/kubernetes/third_party/forked/golang/expansion`."""
    found, at = [], 0
    while at < len(word):
        if word[at] != "$" or at + 1 == len(word):
            found.append(word[at])
            at += 1
        elif word[at + 1] == "$":
            found.append("$")
            at += 2
        elif word[at + 1] == "(" and ")" in word[at:]:
            end = word.index(")", at)
            found.append(f"<the value of {word[at + 2 : end]}>")
            at = end + 1
        else:
            found.append(word[at : at + 2])
            at += 2
    return "".join(found)


@settings(max_examples=100, deadline=None)
@given(words=ANY_WORDS)
def test_any_words_reach_the_program_through_yaml_and_the_kubelet(words: list[str]) -> None:
    job = Job("a", tuple(words), "s3://bucket/a", nodes=2)
    made = manifest(job, words[0], gpus=0, claim=None, grace=60, max_restarts=0)
    read = yaml.safe_load(to_yaml(made))
    assert read == made
    pod = read["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = [as_the_kubelet_expands(word) for word in container["command"]]
    assert command[2 : 2 + len(words)] == words
    assert container["image"] == words[0]


@pytest.mark.slow
def test_the_command_of_a_pod_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    words = ["--workers", "2", "--max-restarts", "1", "--json", "--", "my.py", "--out", "runs/a"]
    printed = json.loads(launched("ray", *words))
    assert printed["file"] == "a_ray.py"
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
        (["kubernetes", "--image", "i", "--", "m.py", "--out", "s3://b/\udce9/a"], "UTF-8"),
        (
            ["kubernetes", "--image", "i", "--claim", "c:/b", "--", "m.py", "--out", "/b/../a"],
            "/b",
        ),
        (["slurm", "--sbatch", "comment=a\ntouch PWN", "--", "my.py", "--out", "a"], "one line"),
        (["slurm", "--", "my.py", "--out", ".."], "--name"),
        (["ray", "--submit", "--", "my.py", "--out", "a"], "ray"),
        (["ray", "--file", "$(touch PWN).py", "--", "my.py", "--out", "a"], "--file"),
    ],
)
def test_what_cannot_be_had_is_refused(
    words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert why in launched(*words, code=2)


@pytest.mark.parametrize(
    ("scheduler", "words", "why"),
    [
        ("slurm", ["my.py", "--steps", "0"], "steps is 0"),
        ("slurm", ["my.py", "--set", "optimizer.lrr=1"], "unknown setting optimizer"),
        ("slurm", ["my.py", "--backend", "dpp"], "Did you mean 'ddp'"),
        ("slurm", ["my.py", "--backend", "fsdp", "--set", "backend.shard_size=x"], "shard_size"),
        ("slurm", ["my.py", "--backend", "ipex", "--set", "precision=fp16"], "precision fp16"),
        ("slurm", ["my.py", "--backend", "cpu"], "more than one process"),
        ("slurm", ["my.py", "--set", "recipe.width=1"], "recipe."),
        ("slurm", ["none.py"], "no recipe file none.py"),
        ("slurm", ["my.py", "--config", "none.toml"], "none.toml cannot be read"),
        ("ray", ["none.py"], "no recipe file none.py"),
        ("kubernetes", ["none.py", "--set", "stepz=1"], "unknown setting stepz"),
        ("kubernetes", ["my.py", "--set", "recipe.width=1"], "recipe."),
    ],
)
def test_what_train_would_refuse_is_refused(scheduler: str, words: list[str], why: str) -> None:
    own = {
        "slurm": ["--nproc", "2"],
        "ray": ["--workers", "2"],
        "kubernetes": ["--image", "i", "--nproc", "2"],
    }
    printed = launched(scheduler, *own[scheduler], "--", *words, "--out", "s3://b/a", code=2)
    assert why in " ".join(printed.split())
    assert {path.name for path in Path().iterdir()} <= {"my.py", "__pycache__"}


@pytest.mark.parametrize(
    "words",
    [
        ["kubernetes", "--image", "i", "--", "none.py", "--config", "none.toml"],
        ["slurm", "--gpus", "2", "--", "my.py", "--backend", "ddp", "--set", "precision=float8"],
        ["slurm", "--nproc", "2", "--", "--set", "recipe.width=32"],
    ],
)
def test_what_may_be_right_there_is_written(words: list[str]) -> None:
    launched(*words, "--out", "s3://b/a")

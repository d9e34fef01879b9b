"""Evaluation beside training: what of the rate of training a follower leaves.

    uv run python -m benchmarks follow --rounds 2

`drivetrain evaluate RUN --follow` reads checkpoints and adds lines to a file, and training knows
nothing of it. On other hardware it can only cost what both do with the storage. Here both run on
one machine, each on cores of its own, and what is compared is the CPU time of the process that
trains: what it does itself, its saves included, and not what it waits for. Memory and a part of the
caches are shared all the same, which they are not elsewhere. So training is also measured beside
an evaluation that does as much, and follows a copy of the run, which training never touches: what
is lost beside that one is lost by following.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from drivetrain import CheckpointSettings, EvaluateSettings, Recipe, Settings

from .harness import ROOT, Benchmark, Column, Measured

EVERY, FEATURES, WIDTH, BATCH = 100, 16, 1024, 64
RECIPE = "from benchmarks.follow import recipe, settings\n"
PATIENCE_SECONDS = 120


def model() -> nn.Module:
    """2.1 million parameters: 25 MB with the optimizer's moments."""
    layers: list[nn.Module] = [nn.Linear(FEATURES, WIDTH), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    for pace in PACES:
        pace.next_step()
    return (module(batch[0]) - batch[1]).square().sum()


def measured_loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"loss": (module(batch[0]) - batch[1]).square().sum()}


def recipe() -> Recipe:
    inputs = torch.randn(2048, FEATURES, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    held_out = torch.utils.data.Subset(data, range(512))
    return Recipe(
        model=model,
        loss=loss,
        measure=measured_loss,
        train_data=data,
        eval_data={"held_out": held_out},
    )


settings = Settings(
    steps=10**6,
    global_batch=BATCH,
    checkpoint=CheckpointSettings(every=EVERY, at_end=False),
    evaluate=EvaluateSettings(at_end=False, sanity_check=False),  # `Pace` counts losses
)


class Pace:
    """Paces the process that trains: waits for a line on stdin, lets it take `EVERY` steps and
    their checkpoint, and prints the seconds that they took.
    """

    def __init__(self) -> None:
        self._steps, self._began, self._answers = 0, (0.0, 0.0), sys.stdout

    def next_step(self) -> None:
        """A step begins."""
        if self._steps % EVERY == 0:
            took = [now - then for now, then in zip(_now(), self._began, strict=True)]
            print(json.dumps(took), file=self._answers, flush=True)
            if not sys.stdin.readline():
                raise SystemExit("all blocks were measured")
            self._began = _now()
        self._steps += 1


PACES: list[Pace] = []
"""The pace of the process that trains; the follower has none."""


def train(file: str, run: str) -> None:
    """Train; runs as a process of its own."""
    from drivetrain.cli.app import app

    torch.set_num_threads(1)
    PACES.append(Pace())
    with contextlib.redirect_stdout(sys.stderr):
        app(["train", file, "--backend", "cpu", "--out", run])


def measure(candidate: str, quick: bool) -> Iterator[Measured]:
    own, *others = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        run, copy, file = (Path(temporary, each) for each in ("run", "copy", "trains.py"))
        file.write_text(RECIPE)
        trains = stack.enter_context(_trains(file, run, own))
        _reported(trains)  # nothing, before the first step
        _go(trains)
        followed = copy if candidate == "copy" else run
        follower = None
        if candidate != "alone":
            if followed is copy:
                shutil.copytree(run, copy)
            follower = stack.enter_context(_follower(followed, others or [own]))
            _until(lambda: bool(_evaluated(followed)))
        for block in itertools.count(1):
            if followed is copy:
                _bring(run / "checkpoints", copy / "checkpoints")
            before = _evaluated(followed)
            with _awake(follower):
                cpu, wall = _go(trains)
            evaluated = _evaluated(followed) - before
            if follower and block > 1 and not evaluated:  # the first finds nothing that is new
                raise SystemExit("nothing was evaluated while it trained, so it was not followed")
            yield {
                "cpu": cpu / EVERY,
                "wall": wall / EVERY,
                "rate": EVERY / cpu,
                "evaluated": evaluated,
            }


def _bring(run: Path, copy: Path) -> None:
    """The checkpoints that are new; each appears whole."""
    for found in run.glob("checkpoint-*"):
        if not (copy / found.name).exists():
            shutil.copytree(found, hidden := copy / f".{found.name}.coming")
            hidden.rename(copy / found.name)


def _now() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


@contextlib.contextmanager
def _trains(file: Path, run: Path, core: int) -> Iterator[subprocess.Popen[str]]:
    words = f"from benchmarks.follow import train; train({str(file)!r}, {str(run)!r})"
    with subprocess.Popen(
        [sys.executable, "-c", words],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        os.sched_setaffinity(process.pid, {core})  # before it has any other thread
        try:
            yield process
        finally:
            process.kill()


def _go(trains: subprocess.Popen[str]) -> tuple[float, float]:
    """CPU and wall seconds of the next steps."""
    assert trains.stdin is not None
    trains.stdin.write("go\n")
    trains.stdin.flush()
    return _reported(trains)


def _reported(trains: subprocess.Popen[str]) -> tuple[float, float]:
    assert trains.stdout is not None
    if not (line := trains.stdout.readline()):
        raise SystemExit("the training ended")
    cpu, wall = json.loads(line)
    return cpu, wall


@contextlib.contextmanager
def _awake(follower: subprocess.Popen[bytes] | None) -> Iterator[None]:
    """Wake the follower for the block. It sleeps while other candidates have their turn."""
    if follower is None:
        yield
        return
    follower.send_signal(signal.SIGCONT)
    yield
    if follower.poll() is not None:
        raise SystemExit(f"the evaluation ended with exit code {follower.returncode}")
    follower.send_signal(signal.SIGSTOP)


@contextlib.contextmanager
def _follower(run: Path, cores: list[int]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "drivetrain.cli", "evaluate", str(run), "--follow"]
    command += ["--seconds", "0.2", "--backend", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as process:
        os.sched_setaffinity(process.pid, cores)  # before it has any other thread
        try:
            yield process
        finally:
            process.kill()  # also where it sleeps


def _evaluated(run: Path) -> int:
    return (run / "metrics.jsonl").read_text().count('"evaluated_on"')


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"the first checkpoint was not there after {PATIENCE_SECONDS} s")
        time.sleep(0.05)


def _missing() -> str:
    if not hasattr(os, "sched_setaffinity"):
        return "processes can be kept to cores on Linux alone"
    cores = len(os.sched_getaffinity(0))
    return "" if cores > 1 else "it takes two cores, one for each process"


BENCHMARKS = [
    Benchmark(
        "follow",
        "Evaluation beside training",
        "A multilayer perceptron of 2.1 million parameters, a checkpoint every 100 steps, each "
        "evaluated by `drivetrain evaluate --follow` in a process that is kept to other cores. CPU "
        "time of the process that trains, its saves included; the rate kept is in steps a second "
        "of it. All share the machine's memory, which they do not on other hardware; so the base "
        "is training beside an evaluation of a copy of the run, which does as much and shares no "
        "file with it. They train 100 steps in turn, while the others and their evaluations sleep.",
        {
            "copy": "beside an evaluation of a copy",
            "followed": "followed by an evaluation",
            "alone": "alone",
        },
        measure,
        (
            Column("CPU ms a step", "cpu", scale=1000, digits=2),
            Column("rate kept, its median at 95 %", "rate", ratio=True, digits=4, certain=True),
            Column("wall ms a step", "wall", scale=1000, digits=2),
            Column("evaluated", "evaluated", digits=0),
        ),
        plotted="CPU ms a step",
        blocks=50,
        missing=_missing,
    )
]

"""Evaluation beside training: what of the rate of training a follower leaves.

    uv run python -m benchmarks follow --rounds 5

`drivetrain evaluate RUN --follow` reads checkpoints and adds lines to a file, and training knows
nothing of it. On other hardware it can only cost what both do with the storage. Here both run on
one machine, each on cores of its own, and what is compared is the CPU time of the process that
trains: what it does itself, its saves included, and not what it waits for. Caches and memory are
shared all the same, which they are not elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    for watch in WATCHES:
        watch.next_step()
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
    steps=EVERY,
    global_batch=BATCH,
    checkpoint=CheckpointSettings(every=EVERY, at_end=False),
    evaluate=EvaluateSettings(at_end=False),
)


@dataclass
class Watch:
    """Takes the time of the steps after the first checkpoint; `begin` and `end` come before and
    after them, and count for nothing."""

    steps: int
    begin: Callable[[], None]
    end: Callable[[], None]
    step: int = 0
    cpu: float = 0.0
    wall: float = 0.0

    def next_step(self) -> None:
        """The next one begins."""
        self.step += 1
        if self.step == EVERY + 1:
            self.begin()
            self.cpu, self.wall = time.process_time(), time.perf_counter()
        elif self.step == EVERY + 1 + self.steps:
            self.cpu = time.process_time() - self.cpu
            self.wall = time.perf_counter() - self.wall
            self.end()


WATCHES: list[Watch] = []
"""One in the process that trains; the follower has none."""


def measure(candidate: str, quick: bool) -> Measured:
    own, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {own})
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        run, file = Path(temporary, "run"), Path(temporary, "trains.py")
        file.write_text(RECIPE)
        found: list[int] = []

        def begin() -> None:
            if candidate == "followed":
                stack.enter_context(_follower(run, others or [own]))
            _until(lambda: bool(_evaluated(run) if candidate == "followed" else _saved(run)))
            found.append(_evaluated(run))

        def end() -> None:
            found.append(_evaluated(run))

        steps = EVERY * (2 if quick else 6)
        watch = Watch(steps, begin, end)
        WATCHES.append(watch)
        _train(file, run, EVERY + steps + 1)
    evaluated = found[1] - found[0]
    if candidate == "followed" and not evaluated:
        raise SystemExit("nothing was evaluated while it trained, so it was not followed")
    return {
        "cpu": watch.cpu / steps,
        "wall": watch.wall / steps,
        "rate": steps / watch.cpu,
        "evaluated": evaluated,
    }


def _train(file: Path, run: Path, steps: int) -> None:
    from drivetrain.cli.app import app

    words = ["train", str(file), "--backend", "cpu", "--steps", str(steps), "--out", str(run)]
    with contextlib.redirect_stdout(sys.stderr):
        app(words, standalone_mode=False)


@contextlib.contextmanager
def _follower(run: Path, cores: list[int]) -> Iterator[None]:
    command = [sys.executable, "-m", "drivetrain.cli", "evaluate", str(run), "--follow"]
    command += ["--seconds", "0.2", "--backend", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as process:
        os.sched_setaffinity(process.pid, cores)  # before it has any other thread
        try:
            yield
        finally:
            process.terminate()


def _saved(run: Path) -> int:
    from drivetrain.checkpoint import list_checkpoints

    return len(list_checkpoints(run / "checkpoints").complete)


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
        "of it. Both share the machine's caches and memory, which they do not on other hardware; "
        "wall time, which waits for the same disk, is told beside it.",
        {"alone": "training alone", "followed": "followed by an evaluation"},
        measure,
        (
            Column("CPU ms a step", "cpu", scale=1000, digits=2),
            Column("rate kept", "rate", ratio=True, digits=4),
            Column("wall ms a step", "wall", scale=1000, digits=2),
            Column("evaluated", "evaluated", digits=0),
        ),
        plotted="CPU ms a step",
        missing=_missing,
    )
]

"""`python -m benchmarks.soak --minutes 60`: does a long life leave anything behind?

    uv run python -m benchmarks.soak --minutes 60 --document
    uv run torchrun --nproc-per-node 2 -m benchmarks.soak --minutes 60 --backend ddp

One process, or one set of ranks, runs and resumes the same training over and over: steps with and
without data workers, evaluations, saves that wait and saves in the background. After each cycle it
counts what this process holds. It fails where anything but rounding has grown between the first
and the last tenth; the cycles before those, while libraries load, do not count.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import platform
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from drivetrain import (
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    Recipe,
    ScheduleSettings,
    Settings,
)
from drivetrain.trainer.fit import fit

from .harness import ROOT
from .report import markdown

PAGE = ROOT / "docs" / "reliability.md"
STEPS = 100
"""Steps of a cycle."""
WARM_UP = 8
"""Cycles that are not compared: two of each kind of `settings`."""
TENTHS = 10


class Held(NamedTuple):
    """Resources that a process holds."""

    memory_bytes: int
    """Resident memory."""
    open_files: int
    threads: int
    children: int
    tensors: int
    """Live tensors that the garbage collector tracks."""
    files: int
    """Files in the run folder."""


LIMITS = {"memory_bytes": 1.02, "tensors": 1.0, "open_files": 1.0, "threads": 1.0, "children": 1.0}
"""Largest growth allowed from the first tenth to the last."""


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 1))


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (module(batch[0]) - batch[1]).square().sum()


def recipe() -> Recipe:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(5000, 16, generator=generator)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    held_out = TensorDataset(inputs[:500], inputs[:500].sum(1, keepdim=True))
    return Recipe(model=model, loss=loss, train_data=data, eval_data={"held_out": held_out})


def settings(cycle: int) -> Settings:
    """Return the settings of the run up to the end of a cycle; four kinds take turns."""
    return Settings(
        steps=STEPS * (cycle + 1),
        global_batch=16,
        micro_batch=4,
        log_every=10,
        schedule=ScheduleSettings(name="constant"),
        data=DataSettings(workers=2 * (cycle % 2)),
        evaluate=EvaluateSettings(every=25),
        checkpoint=CheckpointSettings(every=10, background=cycle % 4 >= 2),
    )


def held(out: Path) -> Held:
    """Count the resources that this process holds now (Linux)."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    children = [
        child
        for task in Path("/proc/self/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return Held(
        pages * resource.getpagesize(),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        len(children),
        sum(issubclass(type(each), Tensor) for each in gc.get_objects()),
        sum(len(files) for _, _, files in os.walk(out)),
    )


def live(minutes: float, backend: str, out: Path) -> Iterator[Held]:
    """Train cycle after cycle, and yield the resources held after each."""
    what, until, cycle = recipe(), time.monotonic() + 60 * minutes, 0
    while time.monotonic() < until or cycle < WARM_UP + TENTHS:
        result = fit(what, settings(cycle), backend=backend, out=out, resume="auto")
        assert result.step == STEPS * (cycle + 1)
        cycle += 1
        yield held(out)


def tenths(measured: list[Held]) -> list[Held]:
    """The medians of ten parts, after the warm-up."""
    counted = measured[WARM_UP:]
    bounds = [len(counted) * part // TENTHS for part in range(TENTHS + 1)]
    parts = [counted[start:stop] for start, stop in itertools.pairwise(bounds)]
    return [Held(*(int(statistics.median(v)) for v in zip(*p, strict=True))) for p in parts]


def growth(parts: list[Held]) -> list[str]:
    """Describe each resource that has grown beyond its limit."""
    first, last = parts[0]._asdict(), parts[-1]._asdict()
    return [
        f"{name}: {first[name]} in the first tenth, {last[name]} in the last"
        for name, limit in LIMITS.items()
        if last[name] > limit * first[name]
    ]


def table(parts: list[Held]) -> str:
    """Markdown."""
    head = ["tenth", "memory (MB)", "open files", "threads", "children", "tensors", "files saved"]
    rows = [
        [str(number), f"{part.memory_bytes / 1e6:.1f}", *map(str, part[1:])]
        for number, part in enumerate(parts, 1)
    ]
    return markdown(head, rows)


def main(
    minutes: Annotated[float, typer.Option(help="At least; some cycles are always run.")] = 60.0,
    backend: Annotated[str, typer.Option(help="Of the kernel.")] = "cpu",
    document: Annotated[bool, typer.Option(help="Write into docs/reliability.md.")] = False,
) -> None:
    """Run, resume, and count."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    began = time.monotonic()
    with run_folder() as out:
        measured = []
        for number, now in enumerate(live(minutes, backend, out), 1):
            measured.append(now)
            if rank == 0:
                print(json.dumps({"cycle": number, **now._asdict()}), file=sys.stderr)
    parts, cycles = tenths(measured), len(measured)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    text = (
        f"{cycles * STEPS} steps in {cycles} runs, each resuming the one before, in "
        f"{(time.monotonic() - began) / 60:.0f} minutes: {cycles * STEPS // 25} evaluations, "
        f"{cycles * STEPS // 10} checkpoints. Backend {backend}, {ranks} rank"
        f"{'s' if ranks > 1 else ''}, rank {rank} measured; torch {torch.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores.\n\n{table(parts)}"
    )
    grown = growth(parts)
    if rank == 0:
        print(text)
        if document and not grown:
            keep(f"{backend} x{ranks}", text)
    for line in grown:
        print(f"rank {rank}: grown: {line}", file=sys.stderr)
    raise typer.Exit(1 if grown else 0)


def keep(name: str, text: str) -> None:
    """Write that section of the page, in its place or at the end."""
    page = PAGE.read_text() if PAGE.exists() else "# Reliability\n"
    section = f"\n## A long life: {name}\n\n{text.strip()}\n"
    found = re.search(rf"\n## A long life: {re.escape(name)}\n.*?(?=\n## |\Z)", page, re.DOTALL)
    start, stop = found.span() if found else (len(page), len(page))
    PAGE.write_text(page[:start] + section + page[stop:])


@contextmanager
def run_folder() -> Iterator[Path]:
    """Make a run folder, the same for all ranks of a launch."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        port = os.environ["MASTER_PORT"]
        folder = Path(tempfile.gettempdir(), f"drivetrain-soak-{port}-{os.getppid()}")
        folder.mkdir(exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="drivetrain-soak-") as made:
        yield Path(made)


if __name__ == "__main__":
    typer.run(main)

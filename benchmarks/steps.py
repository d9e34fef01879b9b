"""What a trainer adds to a step: of a tiny MLP, where it is most of the work, and of a GPT."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial

from torch import nn

from .harness import Benchmark, Clock, Column, Measured, timed
from .problems import GPT, MLP, Problem, checksum
from .trainers import TRAINERS

__all__ = ["BENCHMARKS"]

LABELS = {
    "raw": "raw loop",
    "kernel": "drivetrain kernel",
    "compat": "drivetrain compat",
    "fabric": "Lightning Fabric",
    "accelerate": "Accelerate",
    "hugging_face": "HF Trainer",
    "lightning": "Lightning Trainer",
}
SAVING = {
    **{name: LABELS[name] for name in ("raw", "kernel")},
    "kernel_saving": "drivetrain kernel, saving",
    **LABELS,
}
NEEDS = {
    "fabric": "lightning",
    "accelerate": "accelerate",
    "hugging_face": "transformers",
    "lightning": "lightning",
}
COLUMNS = (
    Column("CPU µs a step", "cpu", scale=1e6, digits=0),
    Column("CPU, times raw", "cpu", ratio=True),
    Column("wall, times raw", "wall", ratio=True),
)


def measure(
    problem: Problem, accumulation: int, steps: int, blocks: int, candidate: str, quick: bool
) -> Measured:
    """Seconds a step: a long run without a short one, so that starting does not count; the median
    of so many blocks of both."""
    train, warm_up = TRAINERS[candidate], max(steps // 10, 2)
    steps = max(steps // 10, 2) if quick else steps

    def run(count: int) -> tuple[Clock, nn.Module]:
        with timed() as clock:
            module = train(problem, count, accumulation)
        return clock, module

    run(warm_up)  # imports, and what is compiled or cached at first
    cpu, wall = [], []
    for _ in range(blocks):
        short, _ = run(warm_up)
        long, module = run(warm_up + steps)
        cpu.append((long.cpu - short.cpu) / steps)
        wall.append((long.wall - short.wall) / steps)
    return {
        "cpu": statistics.median(cpu),
        "wall": statistics.median(wall),
        "checksum": checksum(module),
    }


def _steps(
    name: str,
    title: str,
    about: str,
    problem: Problem,
    accumulation: int,
    steps: int,
    blocks: int = 3,
    n: int = 1,
    labels: Mapping[str, str] = LABELS,
) -> Benchmark:
    return Benchmark(
        name,
        title,
        about,
        labels,
        partial(measure, problem, accumulation, steps, blocks),
        COLUMNS,
        plotted="CPU, times raw",
        equal="checksum",
        processes=n,
        needs=NEEDS,
    )


WORK = (
    "AdamW fused, clipping at 1.0, one thread, the same data in the same order, the mean loss "
    "logged; the checksums of the trained weights are equal, or nothing is shown. The raw loop "
    "is what one writes by hand: it neither checks gradients for NaN nor keeps their norm."
)
BLOCKS = "A round is the median of three such blocks."
BENCHMARKS = [
    _steps(
        "step",
        "A step of a tiny MLP",
        f"Batch 8; 3,000 steps, logged every 500. {BLOCKS} {WORK}",
        MLP,
        accumulation=1,
        steps=3000,
    ),
    _steps(
        "accumulation",
        "The same, accumulating over 4 batches",
        f"Batch 8, four an update; 1,500 updates, logged every 500. {BLOCKS} {WORK}",
        MLP,
        accumulation=4,
        steps=1500,
    ),
    _steps(
        "ddp",
        "The same on 2 processes, DDP over gloo",
        f"Batch 8 a process; 1,500 steps, logged every 500; figures of rank 0. {BLOCKS} {WORK} "
        "Nor do its ranks agree on anything but gradients.",
        MLP,
        accumulation=1,
        steps=1500,
        n=2,
    ),
    _steps(
        "gpt",
        "A step of a GPT of 10 million parameters",
        f"Six layers, width 320, sequences of 128 tokens, batch 8; 20 steps. {WORK} Saving: all "
        "of the state every 10 steps, behind training.",
        GPT,
        accumulation=1,
        steps=20,
        blocks=1,
        labels=SAVING,
    ),
]

"""Time that a trainer adds to a step, of a tiny MLP, for which this is most of the time, and of a
GPT.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
BESIDE_TUNED = {"tuned": "tuned loop", **LABELS}
ON_RANKS = {
    **BESIDE_TUNED,
    "compat_all_used": "drivetrain compat, all parameters used",
    "tuned_searching": "tuned loop that searches",
}
SEARCHING = Column("CPU, times it searching", "cpu", ratio=True, base="tuned_searching")
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


def measure(
    problem: Problem, accumulation: int, steps: int, candidate: str, quick: bool
) -> Iterator[Measured]:
    """Seconds a step: a long run without a short one, so that starting does not count."""
    train, warm_up = TRAINERS[candidate], max(steps // 10, 2)
    steps = max(steps // 10, 2) if quick else steps

    def run(count: int) -> tuple[Clock, nn.Module]:
        with timed() as clock:
            module = train(problem, count, accumulation)
        return clock, module

    run(warm_up)  # imports, and what is compiled or cached at first
    while True:
        short, _ = run(warm_up)
        long, module = run(warm_up + steps)
        yield {
            "cpu": (long.cpu - short.cpu) / steps,
            "wall": (long.wall - short.wall) / steps,
            "checksum": checksum(module),
        }


def _steps(
    name: str,
    title: str,
    about: str,
    problem: Problem,
    accumulation: int,
    steps: int,
    blocks: int = 10,
    n: int = 1,
    labels: Mapping[str, str] = BESIDE_TUNED,
    certain: bool = False,
    more: tuple[Column, ...] = (),
) -> Benchmark:
    base = next(iter(labels))
    times = f"times {base}, its median at 95 %" if certain else f"times {base}"
    return Benchmark(
        name,
        title,
        about,
        labels,
        partial(measure, problem, accumulation, steps),
        (
            Column("CPU µs a step", "cpu", scale=1e6, digits=0),
            Column(f"CPU, {times}", "cpu", ratio=True, certain=certain),
            Column(f"wall, {times}", "wall", ratio=True, certain=certain),
            *more,
        ),
        plotted=f"CPU, {times}",
        equal="checksum",
        blocks=blocks,
        processes=n,
        needs=NEEDS,
    )


WORK = (
    "AdamW fused, clipping at 1.0, one thread, the same data in the same order, the mean loss "
    "logged; the checksums of the trained weights are equal, or nothing is shown. The raw loop "
    "is what one writes by hand: it neither checks gradients for NaN nor keeps their norm."
)
SUM = "The kernel takes the sum of the squared errors, and divides it; the others take their mean."
TUNED = (
    "The tuned loop is what one writes who counts each call: samples fetched without a DataLoader, "
    "one norm, scaled by it only where it is too large, the weight given to backward; it checks "
    "the norm for NaN, and writes the rate. It calls torch's `backward` and `step`; the kernel and "
    "compat call what these call in the end, and leave out what they find out again each time."
)
BENCHMARKS = [
    _steps(
        "step",
        "A step of a tiny MLP",
        f"Batch 8; 1,000 steps a block, logged every 500. {WORK} {SUM} {TUNED}",
        MLP,
        accumulation=1,
        steps=1000,
    ),
    _steps(
        "accumulation",
        "The same, accumulating over 4 batches",
        f"Batch 8, four an update; 500 updates a block, logged every 500. {WORK} {SUM} {TUNED}",
        MLP,
        accumulation=4,
        steps=500,
    ),
    _steps(
        "ddp",
        "The same on 2 processes, DDP over gloo",
        f"Batch 8 a process; 1,000 steps a block, logged every 500; figures of rank 0. {WORK} Nor "
        f"do its ranks agree on anything but gradients. {SUM} {TUNED} Trainers like HF's look for "
        "parameters that an update does not use, unless set not to: beside them stands the tuned "
        "loop in a DDP that does so, too.",
        MLP,
        accumulation=1,
        steps=1000,
        n=2,
        labels=ON_RANKS,
        more=(SEARCHING,),
    ),
    _steps(
        "gpt",
        "A step of a GPT of 10 million parameters",
        f"Six layers, width 320, sequences of 128 tokens, batch 8; 5 steps a block. {WORK} "
        "Saving: all of the state every 5 steps, in the background. A step is so long that what a "
        "trainer adds is less than what two runs of the raw loop differ by: where an interval "
        "holds 1.00, none is faster.",
        GPT,
        accumulation=1,
        steps=5,
        blocks=12,
        labels=SAVING,
        certain=True,
    ),
]

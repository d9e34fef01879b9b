"""Times of steps that `drivetrain plan` expects of several layouts, and those of runs."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise

from .estimates import Case, prepare
from .harness import Benchmark, Column, Measured

__all__ = ["BENCHMARKS"]

NUM_RANKS = 2
STEPS = 8
_UNMEASURED = 2
"""The first steps make what later ones have."""
_BY_ONE = {"micro_batch": 1}
_LAYOUTS = [
    Case("GPT", "ddp"),
    Case("GPT", "ddp", recomputed=True),
    Case("GPT", "ddp", settings=_BY_ONE),
    Case("GPT", "fsdp"),
    Case("GPT", "fsdp", recomputed=True),
    Case("GPT", "fsdp", settings=_BY_ONE),
    *(Case("GPT", "deepspeed", {"stage": stage}) for stage in (1, 2, 3)),
    Case("GPT", "deepspeed", {"stage": 2}, _BY_ONE),
    Case("GPT", "mesh", {"tensor": 2}),
    Case("GPT", "mesh", {"tensor": 2}, recomputed=True),
    Case("GPT", "mesh", {"tensor": 2}, _BY_ONE),
    Case("GPT", "mesh", {"context": 2}),
]
CASES = {case.title: case for case in _LAYOUTS}


def measure(title: str, quick: bool) -> Measured:
    """Return the seconds of a step that are expected of this machine, and those of a run."""
    import torch.distributed as dist

    from drivetrain.kernel.events import StepEnded
    from drivetrain.planning.calibrate import speeds_of_ranks
    from drivetrain.planning.devices import Device
    from drivetrain.planning.estimate import estimate
    from drivetrain.trainer.fit import fit

    case = CASES[title]
    run = prepare(case, NUM_RANKS, quick, steps=STEPS)
    dist.init_process_group()
    speeds = speeds_of_ranks()
    dist.destroy_process_group()
    network = {"network_bytes_per_second": speeds["machine_bytes_per_second"]}
    machine = {"memory_bytes": 1.0, "ranks_per_machine": NUM_RANKS}
    device = Device("here", "measured", **machine, **network, **speeds)
    expected = estimate(run.expected, device)
    ends: list[float] = []

    def note(event: object) -> None:
        if isinstance(event, StepEnded):
            ends.append(time.perf_counter())

    fit(
        run.recipe,
        run.settings,
        backend=case.backend,
        backend_options=case.options,
        observers=[note],
    )
    measured = statistics.median(end - start for start, end in pairwise(ends[_UNMEASURED:]))
    return {
        "expected": expected.seconds,
        "measured": measured,
        "compute": expected.compute_seconds,
        "memory": expected.memory_seconds,
        "network": expected.network_seconds,
    }


BENCHMARKS = [
    Benchmark(
        "layouts",
        f"Time of a step that a plan expects, with {NUM_RANKS} processes over gloo",
        f"A GPT of 55 million parameters is trained by {NUM_RANKS} processes, which are placed in "
        "several ways. Expected: the time of a step by what it computes, moves and sends, with the "
        "speeds of this machine, which are measured before each run as `drivetrain plan "
        f"--calibrate` does ([plan a run](guides/plan.md)). Measured: the median of {STEPS} steps, "
        f"without the first {_UNMEASURED + 1}. What matters is their order, since a plan ranks "
        "ways.",
        {title: title for title in CASES},
        measure,
        (
            Column("expected, s", "expected", digits=2),
            Column("measured, s", "measured", digits=2),
        ),
        plotted="measured, s",
        processes=NUM_RANKS,
    )
]

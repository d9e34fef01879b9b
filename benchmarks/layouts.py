"""Times of steps that `drivetrain plan` expects of several layouts, and those of runs."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from .estimates import Case, prepare
from .harness import Benchmark, Column, Measured, found_before

__all__ = ["BENCHMARKS", "rank_correlation"]

NUM_RANKS = 2
STEPS = 7
_UNMEASURED = 2
"""The first steps make what later ones have."""
_PLACES: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {}),
    ("fsdp", {}),
    *(("deepspeed", {"stage": stage}) for stage in (1, 2, 3)),
    ("mesh", {"tensor": 2}),
    ("mesh", {"context": 2}),
]
CASES = {
    case.title: case
    for backend, options in _PLACES
    for case in (
        Case("GPT", backend, options),
        Case("GPT", backend, options, recomputed=True),
        Case("GPT", backend, options, {"micro_batch": 1}),
    )
}


def calibrate() -> dict[str, Any]:
    """Return the speeds of this machine, as `drivetrain plan --calibrate` writes them."""
    from drivetrain.planning.calibrate import calibrate

    return dataclasses.asdict(calibrate("here", NUM_RANKS, memory_bytes=1))


def measure(title: str, quick: bool) -> Measured:
    """Return the seconds of a step that are expected of this machine, and those of a run."""
    from drivetrain.kernel.events import StepEnded
    from drivetrain.planning.devices import Device
    from drivetrain.planning.estimate import estimate
    from drivetrain.trainer.fit import fit

    case = CASES[title]
    run = prepare(case, NUM_RANKS, quick, steps=STEPS)
    expected = estimate(run.expected, Device(**found_before(calibrate)))
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
        "error": expected.seconds / measured - 1,
        "compute": expected.compute_seconds,
        "memory": expected.memory_seconds,
        "network": expected.network_seconds,
    }


def rank_correlation(record: Mapping[str, Any]) -> float:
    """Return Spearman's correlation of the expected times with the measured ones."""
    found = record["measured"].values()
    expected, measured = (
        _ranks([statistics.median(each[name] for each in rounds) for rounds in found])
        for name in ("expected", "measured")
    )
    return statistics.correlation(expected, measured)


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the place of each value among all in order; equal ones share their mean place."""
    return [
        sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values
    ]


def _conclusion(record: Mapping[str, Any]) -> str:
    return (
        "Rank correlation of the expected and the measured times (Spearman): "
        f"{rank_correlation(record):.2f}."
    )


BENCHMARKS = [
    Benchmark(
        "layouts",
        f"Time of a step that a plan expects, with {NUM_RANKS} processes over gloo",
        f"A GPT of 55 million parameters is trained by {NUM_RANKS} processes, which are placed in "
        f"{len(_PLACES)} ways, each as it is, with blocks that are computed again in the backward, "
        "and with microbatches of one sample. Expected: the time of a step by what it computes, "
        "moves and sends, with the speeds of this machine, which are measured once before all, as "
        "`drivetrain plan --calibrate` does ([plan a run](guides/plan.md)). Measured: the median "
        f"of {STEPS} steps without the first {_UNMEASURED + 1}. What matters is their order, since "
        "a plan ranks ways.",
        {title: title for title in CASES},
        measure,
        (
            Column("expected, s", "expected", digits=2),
            Column("measured, s", "measured", digits=2),
            Column("error, %", "error", scale=100, digits=0),
        ),
        plotted="measured, s",
        processes=NUM_RANKS,
        before=calibrate,
        conclusion=_conclusion,
    )
]

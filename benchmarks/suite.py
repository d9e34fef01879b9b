"""All benchmarks by name."""

from __future__ import annotations

from . import (
    audit,
    checkpoint,
    clock,
    corruptions,
    defaults,
    estimates,
    follow,
    gpu,
    layouts,
    nonfinite,
    packing,
    predict,
    recover,
    resume,
    start,
    steps,
    verdicts,
)
from .harness import Benchmark

BENCHMARKS: dict[str, Benchmark] = {
    each.name: each
    for each in (
        *steps.BENCHMARKS,
        *packing.BENCHMARKS,
        *predict.BENCHMARKS,
        *checkpoint.BENCHMARKS,
        *resume.BENCHMARKS,
        *start.BENCHMARKS,
        *follow.BENCHMARKS,
        *defaults.BENCHMARKS,
        *audit.BENCHMARKS,
        *clock.BENCHMARKS,
        *verdicts.BENCHMARKS,
        *corruptions.BENCHMARKS,
        *nonfinite.BENCHMARKS,
        *recover.BENCHMARKS,
        *estimates.BENCHMARKS,
        *layouts.BENCHMARKS,
        *gpu.BENCHMARKS,
    )
}

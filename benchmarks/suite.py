"""All benchmarks by name."""

from __future__ import annotations

from . import checkpoint, defaults, follow, gpu, packing, predict, resume, start, steps
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
        *gpu.BENCHMARKS,
    )
}

"""One candidate in a process of its own: `python -m benchmarks.one BENCHMARK CANDIDATE`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from .harness import ANSWER, TURNS, Benchmark, Measured
from .suite import BENCHMARKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("candidate")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    measured = _blocks(BENCHMARKS[asked.benchmark], asked.candidate, asked.quick)
    for _ in _turns(rank):
        figures = next(measured)
        if rank == 0:
            print(f"\n{ANSWER}{json.dumps(figures)}", flush=True)


def _blocks(benchmark: Benchmark, candidate: str, quick: bool) -> Iterator[Measured]:
    measured = benchmark.measure(candidate, quick)
    yield from (measured,) if isinstance(measured, dict) else measured


def _turns(rank: int) -> Iterator[str]:
    """Yield a turn for each line of the process that began this one; one turn without such a
    process.
    """
    if TURNS not in os.environ:
        yield ""
        return
    with open(Path(os.environ[TURNS], str(rank))) as turns:
        yield from turns


if __name__ == "__main__":
    main()

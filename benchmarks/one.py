"""One candidate in a process of its own: `python -m benchmarks.one BENCHMARK CANDIDATE`."""

from __future__ import annotations

import argparse
import json
import os

import torch

from .harness import ANSWER
from .suite import BENCHMARKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("candidate")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    figures = BENCHMARKS[asked.benchmark].measure(asked.candidate, asked.quick)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"\n{ANSWER}{json.dumps(figures)}", flush=True)


if __name__ == "__main__":
    main()

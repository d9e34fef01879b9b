"""Runs the tests again and again, and prints which failed, how often, and whether alone, too.

    python tests/steady.py --runs 6                        the quick part
    python tests/steady.py --runs 3 --busy 4               beside four processes that compute
    python tests/steady.py --runs 1 -- -m slow --shard 0/12

What follows `--` is for pytest. The tables are Markdown. The load is the number of processes that
want to run: its median and its maximum, sampled each five seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Run:
    """One run of the tests, and how each of its failures was counted."""

    exit_code: int
    last_line: str
    seconds: float
    loads: list[float]
    failures: dict[str, str] = field(default_factory=dict)

    def row(self, number: int) -> str:
        """A row of the first table."""
        load = f"{statistics.median(self.loads):.1f} | {max(self.loads):.1f}"
        outcome = "green" if self.exit_code == 0 else f"red ({self.exit_code})"
        return f"| {number} | {outcome} | {self.last_line} | {self.seconds / 60:.1f} | {load} |"


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Let processes compute, as long as the context lasts."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def load_sampled(every: float = 5.0) -> Iterator[list[float]]:
    """Yield a list to which the load is added as time passes."""
    loads, over = [os.getloadavg()[0]], threading.Event()

    def sample() -> None:
        while not over.wait(every):
            loads.append(os.getloadavg()[0])

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield loads
    finally:
        over.set()
        sampler.join()


def run(options: Sequence[str], folder: Path) -> Run:
    """Run the tests of a folder once."""
    with tempfile.TemporaryDirectory() as temporary, load_sampled() as loads:
        failures = Path(temporary, "failures.json")
        command = [sys.executable, "-m", "pytest", "--failures", str(failures), *options]
        began = time.monotonic()
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        counted = json.loads(failures.read_text()) if failures.exists() else {}
    last_line = (done.stdout.splitlines() or [""])[-1].strip("= ")
    return Run(done.returncode, last_line, time.monotonic() - began, loads, counted)


def table(runs: Sequence[Run]) -> str:
    """The tests that failed: how often, and how their failures were counted."""
    ways = Counter((test, way) for run in runs for test, way in run.failures.items())
    lines = ["| test | failed in | of them alone, too |", "|---|---:|---:|"]
    for test in sorted({test for test, _ in ways}):
        often = sum(count for (other, _), count in ways.items() if other == test)
        alone = often - ways[test, "unstable"]
        lines.append(f"| `{test}` | {often} of {len(runs)} | {alone} |")
    return "\n".join(lines) if ways else "No test failed."


def main(words: Sequence[str] | None = None) -> int:
    """Print a row after each run, and the tests that failed at the end; 1 if a run was red."""
    summary, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside them")
    parser.add_argument("pytest", nargs="*", help="options for pytest, after --")
    options = parser.parse_args(words)
    print("| run | outcome | tests | minutes | load, median | load, most |", flush=True)
    print("|---:|---|---|---:|---:|---:|", flush=True)
    runs = []
    with busy(options.busy):
        for number in range(1, options.runs + 1):
            runs.append(run(options.pytest, Path.cwd()))
            print(runs[-1].row(number), flush=True)
    print(f"\n{table(runs)}")
    return int(any(each.exit_code for each in runs))


if __name__ == "__main__":
    sys.exit(main())

"""Candidates side by side: one process for each candidate and round, in turn (A B C A B C ...).

The machine changes from minute to minute, so ratios are taken inside a round, and what a table
shows is their median and spread. Where a second is enough, the processes of a round live side by
side and work in turn, a block each (a b c a b c ...), so that ratios are taken inside seconds.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Measured = dict[str, float]
"""Name of a figure -> its value, in seconds, bytes or counts."""

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("torch", "transformers", "accelerate", "deepspeed", "lightning", "safetensors")


@dataclass(frozen=True)
class Column:
    """A figure in a table: itself, or its ratio to a base candidate's in the same round."""

    title: str
    key: str
    ratio: bool = False
    base: str = ""
    """The candidate that a ratio is to; the first one where this is empty."""
    scale: float = 1.0
    digits: int = 2
    certain: bool = False
    """True to show the interval of the median (`interval`), not the spread of the measurements."""

    def values(self, own: Sequence[Measured], base: Sequence[Measured]) -> list[float]:
        if not self.ratio:
            return [each[self.key] * self.scale for each in own if self.key in each]
        pairs = zip(own, base, strict=True)
        return [a[self.key] / b[self.key] for a, b in pairs if a.get(self.key) and b.get(self.key)]

    def cell(self, own: Sequence[Measured], base: Sequence[Measured]) -> str:
        values = self.values(own, base)
        if not values:
            return ""
        middle = f"{statistics.median(values):.{self.digits}f}"
        if not self.ratio or len(values) == 1:
            return middle
        low, high = interval(values) if self.certain else spread(values)
        return f"{middle} [{low:.{self.digits}f}-{high:.{self.digits}f}]"


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The least and the greatest; of more than 8, the first and the third quartile."""
    if len(values) <= 8:
        return min(values), max(values)
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of the median with a confidence of 95 %, however the values are
    distributed.

    Fewer than 6 values cannot reach this confidence: their least and greatest are returned. Each
    value lies below the median with probability 1/2, so ranks of the sorted values follow a
    binomial distribution (Conover, Practical Nonparametric Statistics, 3rd edition, 3.2).
    """
    ordered, missed, left_out = sorted(values), 0.0, -1
    while True:
        missed += 2 * math.comb(len(ordered), left_out + 1) / 2 ** len(ordered)
        if missed > 0.05:
            break
        left_out += 1
    left_out = max(left_out, 0)
    return ordered[left_out], ordered[-1 - left_out]


@dataclass(frozen=True)
class Benchmark:
    """A measurement, its candidates, and the columns of its table."""

    name: str
    title: str
    about: str
    candidates: Mapping[str, str]
    """Key -> how a table names it; the first one is the base of ratios."""
    measure: Callable[[str, bool], Measured | Iterator[Measured]]
    """`measure(candidate, quick)`, in a process of its own; with blocks, without end."""
    columns: tuple[Column, ...]
    plotted: str
    """The title of the column that the plot shows."""
    equal: str = ""
    """A figure that must be the same for all, or they did not do the same work."""
    blocks: int = 0
    """Number of blocks in a round, after one that does not count; 0: a round is one call."""
    processes: int = 1
    needs: Mapping[str, str] = field(default_factory=dict)
    """Candidate -> the package that it needs besides drivetrain's own."""
    before: Callable[[], Any] | None = None
    """Returns what is measured once, before all candidates: see `found_before`."""
    conclusion: Callable[[Mapping[str, Any]], str] = lambda record: ""
    """Return a sentence on a record, for the end of its table."""
    missing: Callable[[], str] = str
    """Return why nothing can be measured on this machine, or an empty string. `--quick` runs
    anyway.
    """

    def here(self) -> list[str]:
        """The candidates whose packages are installed."""
        return [
            each
            for each in self.candidates
            if each not in self.needs or importlib.util.find_spec(self.needs[each])
        ]

    def rounds(self, count: int, quick: bool, report: Callable[[str], None]) -> dict[str, Any]:
        """Everything that was measured, and where."""
        load, started = os.getloadavg()[0], time.time()
        blocks = min(self.blocks, 2) if quick else self.blocks
        measured: dict[str, list[Measured]] = {name: [] for name in self.here()}
        before = None if self.before is None else self.before()
        for number in range(1, count + 1):
            with contextlib.ExitStack() as round_:
                begun: dict[str, Callable[[], Measured]] = {}
                for name, found in measured.items():
                    report(f"{self.name}: round {number} of {count}, {name}")
                    if blocks:
                        begun[name] = round_.enter_context(self._process(name, quick, before))
                        begun[name]()
                    else:
                        with self._process(name, quick, before) as measure:
                            found.append(measure())
                for _ in range(blocks):
                    for name, measure in begun.items():
                        measured[name].append(measure())
        if self.equal:
            _same([each[self.equal] for rounds in measured.values() for each in rounds], measured)
        seconds = time.time() - started
        return {
            "benchmark": self.name,
            "rounds": count,
            **({"blocks": blocks} if blocks else {}),
            "quick": quick,
            "machine": machine() | {"load_before": load, "seconds": round(seconds)},
            **({} if before is None else {"before": before}),
            "measured": measured,
        }

    @contextlib.contextmanager
    def _process(
        self, candidate: str, quick: bool, before: Any
    ) -> Iterator[Callable[[], Measured]]:
        """A candidate's process; it measures at each call of what this gives, and waits between."""
        with tempfile.TemporaryDirectory() as folder, open(f"{folder}/stderr", "w+") as errors:
            command = torchrun(self.processes, folder) if self.processes > 1 else [sys.executable]
            command += ["-m", "benchmarks.one", self.name, candidate]
            command += ["--quick"] if quick else []
            turns = [_pipe(f"{folder}/{rank}") for rank in range(self.processes)]
            environment = {**os.environ, TURNS: folder, BEFORE: json.dumps(before)}
            with subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            ) as process:

                def measure() -> Measured:
                    for turn in turns:
                        os.write(turn, b"go\n")
                    said = []
                    for line in process.stdout or ():
                        said.append(line)
                        if line.startswith(ANSWER):
                            found: Measured = json.loads(line.removeprefix(ANSWER))
                            return found
                    errors.seek(0)
                    output = f"{''.join(said)}\n{errors.read()}"
                    raise SystemExit(f"{self.name}: {candidate} failed:\n{output}")

                try:
                    yield measure
                except BaseException:
                    process.kill()
                    raise
                finally:
                    for turn in turns:
                        os.close(turn)

    def rows(self, record: Mapping[str, Any]) -> list[list[str]]:
        """The table of a record, without its head."""
        measured, first = record["measured"], next(iter(self.candidates))
        return [
            [
                label,
                *(each.cell(measured[name], measured[each.base or first]) for each in self.columns),
            ]
            for name, label in self.candidates.items()
            if name in measured
        ]


def torchrun(processes: int, folder: str) -> list[str]:
    """Return torchrun's command for processes of this machine. Torch does not delete its logs, so
    they lie in `folder`."""
    options = ["--standalone", f"--nproc-per-node={processes}", f"--log-dir={folder}/torchrun"]
    return [sys.executable, "-m", "torch.distributed.run", *options]


ANSWER = "measured: "
"""Begins the line in which a candidate's process reports its figures."""
TURNS = "BENCHMARK_TURNS"
"""Names the folder of the pipes by which a candidate's ranks receive their turn."""
BEFORE = "BENCHMARK_BEFORE"
"""Holds what was measured before all candidates, as JSON."""


def found_before(measure: Callable[[], Any]) -> Any:
    """Return what was measured before all candidates, in a candidate's process. One that was
    started by hand measures it itself."""
    return json.loads(os.environ[BEFORE]) if BEFORE in os.environ else measure()


def _pipe(path: str) -> int:
    """A pipe with a name, to write to. It is opened for both, since else it would wait for who
    reads it."""
    os.mkfifo(path)
    return os.open(path, os.O_RDWR)


def machine() -> dict[str, Any]:
    """Return the hardware and the versions of the software that the figures depend on."""
    versions = {"Python": platform.python_version()}
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    import torch

    device = {"device": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "processor": _processor(),
        **device,
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "versions": versions,
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _same(values: Sequence[float], measured: Any) -> None:
    if not all(math.isclose(value, values[0], rel_tol=1e-4) for value in values):
        raise SystemExit(f"the candidates did not do the same work: {measured}")


@dataclass
class Clock:
    """Seconds of this process, and of the world, within a block."""

    cpu: float = 0.0
    wall: float = 0.0


@contextlib.contextmanager
def timed() -> Iterator[Clock]:
    clock = Clock()
    cpu, wall = time.process_time(), time.perf_counter()
    try:
        yield clock
    finally:
        clock.cpu, clock.wall = time.process_time() - cpu, time.perf_counter() - wall


def finish() -> None:
    """Wait for what is queued on a GPU, where there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes() -> int:
    """The most memory that this process held since it began, or since `reset_peak` (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no VmHWM")


def reset_peak() -> int:
    """Forget the peak; returns what is held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()

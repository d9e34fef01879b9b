"""Time that the page of a long run takes: to read its records, to draw it, and beside a training.

python -m benchmarks.pages --megabytes 1024
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivetrain.run.run_folder_writer import RunFolderWriter
from drivetrain.run.run_history import HistoryFile

STARTED = {
    "event": "run_started",
    "first_step": 0,
    "num_parameters": 7,
    "total_steps": 10**9,
    "backend": "cpu",
    "world": {"size": 1},
}


def logged(step: int) -> dict[str, Any]:
    """Return a record of kind `logged`, with invented figures."""
    return {
        "event": "logged",
        "time": 1795574131.772 + step,
        "step": step,
        "loss": 1 / step,
        "learning_rate": 1e-3 / step,
        "grad_norm": 0.12345678901234 + 1 / step,
        "items": 4.0,
        "items_per_second": 123.4567890123 + 1 / step,
        "step_seconds": 0.0101234567,
        "skipped": 0,
        "losses": {},
        "total_steps": 10**9,
        "seconds_left": 123.3,
        "item_name": "samples",
        "mfu": 0.4321,
        "process_peak_bytes": 512345678,
        "process_bytes": 412345678 + step % 4096,
        "processor_cores": 1.23456789 + 1 / step,
    }


def evaluated(step: int) -> dict[str, Any]:
    """Return a record of kind `evaluated`."""
    return {"event": "evaluated", "step": step, "name": "held_out", "metrics": {"loss": 1 / step}}


def write(path: Path, num_bytes: int) -> int:
    """Write records until the file has `num_bytes`; return the number of the last step."""
    step = written = 0
    with path.open("w") as file:
        written += file.write(json.dumps(STARTED) + "\n")
        while written < num_bytes:
            step += 1
            written += file.write(json.dumps(logged(step)) + "\n")
    return step


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and seconds of the processor."""
    start, used = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - start, time.process_time() - used


def peak_megabytes() -> float:
    """Return the peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 10)


def measure(folder: Path, num_bytes: int) -> dict[str, float]:
    """Return all figures of a file of `num_bytes`."""
    steps = write(folder / "metrics.jsonl", num_bytes)
    before = peak_megabytes()
    wall, cpu = timed(HistoryFile(folder / "metrics.jsonl").read)
    writer = RunFolderWriter(folder, {}, lambda started, reason: "")
    writer.sink({**STARTED, "first_step": steps})
    assert writer.history is not None
    writer.history.wait()
    drawings = [timed(lambda: writer.sink(evaluated(steps + 1))) for _ in range(5)]
    return {
        "records": steps,
        "megabytes": num_bytes / (1 << 20),
        "reading seconds": wall,
        "reading seconds of the processor": cpu,
        "evaluation seconds": sorted(each for each, _ in drawings)[2],
        "more megabytes of memory": peak_megabytes() - before,
    }


def main(arguments: list[str]) -> None:
    """Print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=1024)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        for name, value in measure(Path(folder), int(asked.megabytes * (1 << 20))).items():
            print(f"{name}: {value:.4g}")


if __name__ == "__main__":
    main(sys.argv[1:])

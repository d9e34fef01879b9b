"""Cost of an import, and of a first step, over `import torch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from .harness import ROOT, Benchmark, Column, Measured
from .steps import LABELS, NEEDS

IMPORTS = {
    "nothing": "pass",
    "kernel": "import drivetrain.kernel",
    "compat": "import drivetrain.compat",
    "compat_names": "from drivetrain.compat import Trainer, TrainingArguments",
    "accelerate": "from accelerate import Accelerator",
    "fabric": "from lightning.fabric import Fabric",
    "lightning": "from lightning.pytorch import Trainer",
    "hugging_face": "from transformers import Trainer, TrainingArguments",
}


FIRST_STEP = """from benchmarks.problems import MLP
from benchmarks.trainers import TRAINERS
TRAINERS[{!r}](MLP, 1, 1)"""

SCRIPT = """
import json, sys, time
import torch

def held():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10

modules, memory = len(sys.modules), held()
cpu, wall = time.process_time(), time.perf_counter()
exec(sys.argv[1])
cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
more = {"bytes": held() - memory, "modules": len(sys.modules) - modules}
print(json.dumps({"cpu": cpu, "wall": wall, **more}))
"""


def measure(candidate: str, quick: bool) -> Measured:
    return _apart(IMPORTS[candidate])


def measure_first_step(candidate: str, quick: bool) -> Measured:
    return _apart(FIRST_STEP.format(candidate))


def _apart(statements: str) -> Measured:
    """Measure in a process that has imported torch and nothing else. An earlier process has written
    the bytecode, as an installation does.
    """
    command = [sys.executable, "-c", SCRIPT, statements]
    writing = {name: it for name, it in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(2):
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=writing, cwd=ROOT
        )
    figures: Measured = json.loads(done.stdout.splitlines()[-1])
    return figures


BENCHMARKS = [
    Benchmark(
        "import",
        "Imports",
        "What each adds to a process that has imported torch; nothing is constructed. MiB: memory "
        "held after it.",
        {name: f"`{statement}`" for name, statement in IMPORTS.items()},
        measure,
        (
            Column("CPU s", "cpu", digits=3),
            Column("wall s", "wall", digits=3),
            Column("MiB", "bytes", scale=2**-20, digits=1),
            Column("modules", "modules", digits=0),
        ),
        plotted="CPU s",
        needs=NEEDS,
    ),
    Benchmark(
        "first_step",
        "To the end of the first step",
        "Of the tiny MLP, in a process that has imported torch: imports, all that is constructed, "
        "one step and the end of the run. Most of the raw loop's is torch's own: its optimizers "
        "import its compiler.",
        LABELS,
        measure_first_step,
        (
            Column("CPU s", "cpu"),
            Column("CPU, times raw", "cpu", ratio=True),
            Column("wall s", "wall"),
            Column("MiB", "bytes", scale=2**-20, digits=0),
            Column("modules", "modules", digits=0),
        ),
        plotted="CPU, times raw",
        needs=NEEDS,
    ),
]

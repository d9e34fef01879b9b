"""What an import costs over `import torch`."""

from __future__ import annotations

import sys

from .harness import Benchmark, Column, Measured, peak_bytes, timed

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


def measure(candidate: str, quick: bool) -> Measured:
    modules, before = set(sys.modules), peak_bytes()
    with timed() as clock:
        exec(IMPORTS[candidate])
    return {
        "cpu": clock.cpu,
        "wall": clock.wall,
        "bytes": peak_bytes() - before,
        "modules": len(set(sys.modules) - modules),
    }


BENCHMARKS = [
    Benchmark(
        "import",
        "Imports",
        "What each adds to a process that has imported torch; nothing is constructed.",
        {name: f"`{statement}`" for name, statement in IMPORTS.items()},
        measure,
        (
            Column("CPU s", "cpu", digits=3),
            Column("wall s", "wall", digits=3),
            Column("MiB", "bytes", scale=2**-20, digits=1),
            Column("modules", "modules", digits=0),
        ),
        plotted="CPU s",
        needs={
            "accelerate": "accelerate",
            "fabric": "lightning",
            "lightning": "lightning",
            "hugging_face": "transformers",
        },
    )
]

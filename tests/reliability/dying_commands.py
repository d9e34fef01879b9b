"""Commands whose ranks die."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

SOURCE = """
import os, time, torch
from torch import nn
from torch.utils.data import TensorDataset
from drivetrain import Recipe

x = torch.randn(203, 8, generator=torch.Generator().manual_seed(3))

def loss(module, batch):
    time.sleep(0.01)
    return (module(batch[0]) - batch[1]).square().sum()

recipe = Recipe(
    model=lambda: nn.Linear(8, 1),
    loss=loss,
    train_data=TensorDataset(x, x.sum(1, keepdim=True)),
)
"""


class Command:
    """`drivetrain train` on three ranks, which continues without those that die."""

    def __init__(self, folder: Path, *more: str, source: str = SOURCE) -> None:
        (folder / "recipe.py").write_text(source)
        command = [sys.executable, "-m", "drivetrain.cli", "train", "recipe.py", "--nproc", "3"]
        command += ["--backend", "ddp", "--out", "run", "--plain", "--set", "recover=in_place"]
        command += ["--set", "log_every=1", "--set", "global_batch=12", *more]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        for each in [*self.ranks(), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def ranks(self) -> list[int]:
        """Return the process numbers of the ranks, in the order in which they were started."""
        found = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return sorted(int(word) for each in found for word in each.read_text().split())

    def until(self, pattern: str) -> str:
        """Read lines up to one that matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no {pattern!r} in {''.join(self.lines)}")


def is_running(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"

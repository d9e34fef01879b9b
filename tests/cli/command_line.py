"""Files and settings for runs of the command line, and their results."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

RECIPE = """
    from dataclasses import dataclass
    import torch
    from torch import nn
    from drivetrain.kernel.contract import Recipe
    from drivetrain.trainer.settings import Settings

    settings = Settings(steps=6, global_batch=4, log_every=2)


    @dataclass(frozen=True)
    class Config:
        width: int = 4


    class Points:
        def __init__(self, count):
            generator = torch.Generator().manual_seed(0)
            self.x = torch.randn(count, 3, generator=generator)

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            return {"x": self.x[index], "y": self.x[index].sum(0, keepdim=True)}


    def recipe(config: Config) -> Recipe:
        return Recipe(
            model=lambda: nn.Sequential(nn.Linear(3, config.width), nn.Linear(config.width, 1)),
            loss=lambda module, batch: ((module(batch["x"]) - batch["y"]) ** 2).sum(),
            train_data=Points(40),
            eval_data={"held_out": Points(8)},
            flops_per_item=6.0 * 4 * config.width,
        )


    def sample(module) -> str:
        return "a <sample>"
"""


@dataclass(frozen=True)
class Ran:
    """Exit code and output of a command."""

    code: int
    stdout: str
    stderr: str

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stdout.splitlines()]


def child(arguments: tuple[str, ...], folder: Path, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    tempfile.tempdir = None  # found again: the environment may name another
    for number, name in ((1, "stdout"), (2, "stderr")):
        handle = os.open(folder / f".{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = ["drivetrain", *arguments]
    multiprocessing.set_start_method("fork", force=True)  # as in a process that nobody served
    from drivetrain.cli import main

    main()


Drive = Callable[..., Ran]
Meanwhile = Callable[[BaseProcess], None]


def when_it_trains(folder: Path, act: Meanwhile) -> Meanwhile:
    """Return what waits until a command with `--json` in the folder has logged, and then acts."""

    def meanwhile(process: BaseProcess) -> None:
        while '"logged"' not in (folder / ".stdout").read_text():
            assert process.is_alive()
            time.sleep(0.05)
        act(process)

    return meanwhile

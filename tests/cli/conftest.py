"""A run of the command line costs seconds of imports, so tests run it in forks of this process."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

RECIPE = """
    from dataclasses import dataclass
    import torch
    from torch import nn
    from drivetrain.kernel.contract import Recipe
    from drivetrain.kernel.settings import Settings

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
    """What a command came to."""

    code: int
    stdout: str
    stderr: str

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stdout.splitlines()]


def _child(arguments: tuple[str, ...], folder: Path, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    for number, name in ((1, "stdout"), (2, "stderr")):
        handle = os.open(folder / f".{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = ["drivetrain", *arguments]
    from drivetrain.cli import main

    main()


Drive = Callable[..., Ran]
Meanwhile = Callable[[BaseProcess], None]


@pytest.fixture(scope="session")
def server() -> multiprocessing.context.ForkServerContext:
    """Forks from a process that has imported what a run needs, and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["drivetrain.cli.app", "drivetrain.cli.train", "torch._dynamo", "matplotlib.figure"]
    )
    return context


@pytest.fixture
def drive(tmp_path: Path, server: multiprocessing.context.ForkServerContext) -> Drive:
    """Run `drivetrain ARGUMENTS` in the test's folder."""

    def run(*arguments: object, meanwhile: Meanwhile | None = None, **environment: str) -> Ran:
        words = tuple(str(argument) for argument in arguments)
        (tmp_path / ".stdout").write_text("")
        process = server.Process(target=_child, args=(words, tmp_path, environment))
        process.start()
        if meanwhile is not None:
            meanwhile(process)
        process.join(120)
        assert process.exitcode is not None, f"drivetrain {' '.join(words)} hangs"
        out, err = ((tmp_path / name).read_text() for name in (".stdout", ".stderr"))
        return Ran(process.exitcode, out, err)

    return run


@pytest.fixture
def shell(tmp_path: Path) -> Drive:
    """Paste a command into a shell in the test's folder."""

    def run(command: str) -> Ran:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe file in the test's folder that trains in a moment."""
    path = tmp_path / "small.py"
    path.write_text(textwrap.dedent(RECIPE))
    return path

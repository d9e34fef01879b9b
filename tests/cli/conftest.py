"""Fixtures that run the command line in forks of one process, since each start costs seconds of
imports.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from command_line import RECIPE, Drive, Meanwhile, Ran, child


@pytest.fixture(scope="session")
def server() -> multiprocessing.context.ForkServerContext:
    """Return a context that forks from a process which has imported what a run needs, and has run
    nothing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["drivetrain.cli.app", "drivetrain.cli.training.train", "torch._dynamo"]
    )
    return context


@pytest.fixture
def drive(tmp_path: Path, server: multiprocessing.context.ForkServerContext) -> Drive:
    """Return a function that runs `drivetrain ARGUMENTS` in the test's folder."""

    def run(*arguments: object, meanwhile: Meanwhile | None = None, **environment: str) -> Ran:
        words = tuple(str(argument) for argument in arguments)
        (tmp_path / ".stdout").write_text("")
        process = server.Process(target=child, args=(words, tmp_path, environment))
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
    """Return a function that runs a command in a shell in the test's folder."""

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
    """Write a recipe file that trains in a moment, in the test's folder."""
    path = tmp_path / "small.py"
    path.write_text(textwrap.dedent(RECIPE))
    return path

"""A training that a scheduler starts: its command, and what is refused before it is written."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import typer

from ...checkpoint.storage.local import replace_text
from ...kernel.errors import SettingError, UsageError
from ..commands.train import app as train_app

__all__ = ["Job", "job_of", "submit", "write"]

_PORT = 29400
_OURS = {
    "nproc": 1,
    "nnodes": None,
    "node_rank": None,
    "master_addr": None,
    "master_port": None,
    "rdzv_backend": None,
    "rdzv_endpoint": None,
    "rdzv_id": None,
}
"""Arguments of `drivetrain train` that the job says, and what they are when nobody gave them."""


@dataclass(frozen=True)
class Job:
    """A training: the arguments of `drivetrain train`, and how many processes."""

    name: str
    arguments: tuple[str, ...]
    out: str
    """The run folder, or its URL."""
    nodes: int = 1
    nproc: int = 1
    """On each node."""

    def command(self, host: str, run_id: str) -> list[str]:
        """The words after `drivetrain` that start it on each of the nodes, which meet at `host`."""
        words = ["train", *self.arguments]
        if self.nproc > 1 or self.nodes > 1:
            words += ["--nproc", str(self.nproc)]
        if self.nodes > 1:
            words += ["--nnodes", str(self.nodes), "--rdzv-backend", "c10d"]
            words += ["--rdzv-endpoint", f"{host}:{_PORT}", "--rdzv-id", run_id]
        return words


def job_of(arguments: Sequence[str], name: str | None, nodes: int, nproc: int) -> Job:
    """A job that goes on where it was when it is started again. Raises `SettingError`."""
    given = _parsed(arguments)
    for option, without in _OURS.items():
        if given[option] != without:
            raise SettingError(
                f"--{option.replace('_', '-')} stands among the arguments of train; the job says "
                "it, by options of its own before the --"
            )
    out = given["out"]
    if out is None:
        raise SettingError(
            "a job that is started again needs its run folder: give --out after the --"
        )
    resuming = () if given["resume"] is not None else ("--resume", "auto")
    return Job(
        name=re.sub(r"[^\w.-]+", "-", name or PurePosixPath(out).name),
        arguments=(*arguments, *resuming),
        out=out,
        nodes=nodes,
        nproc=nproc,
    )


def _parsed(arguments: Sequence[str]) -> Mapping[str, Any]:
    """What `drivetrain train` would take. Raises `SettingError`."""
    command: Any = typer.main.get_command(train_app)
    try:
        context = command.make_context("train", list(arguments))
    except Exception as error:  # of click, or of the copy of it that typer carries
        raise SettingError(f"drivetrain train refuses {' '.join(arguments)}: {error}") from error
    parameters: Mapping[str, Any] = context.params
    return parameters


def write(path: Path, text: str) -> None:
    """Write a file of the job. Raises `UsageError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from error


def submit(command: Sequence[str]) -> str:
    """Hand a job over; what the scheduler's program says. Raises `UsageError`."""
    program = command[0]
    if shutil.which(program) is None:
        raise UsageError(
            f"--submit needs {program}, which is not on this machine; the file is written: run "
            f"`{' '.join(command)}` where it is"
        )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()

"""A training that a scheduler starts: its command, and checks before its file is written."""

from __future__ import annotations

import posixpath
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ...checkpoint.storage.local import LOCAL
from ...kernel.errors import SettingError, UsageError
from ..settings.train_options import MEETING
from .checks import check_arguments

__all__ = ["Job", "as_argument", "job_of", "submit", "write"]

_PORT = 29400
_OURS = {"nproc": 1, **dict.fromkeys(("nnodes", *MEETING))}
"""Options of `drivetrain train` that the job chooses, with their defaults."""


@dataclass(frozen=True)
class Job:
    """A training: the arguments of `drivetrain train`, and the number of processes."""

    name: str
    arguments: tuple[str, ...]
    out: str
    """The run folder, or its URL."""
    nodes: int = 1
    nproc: int = 1
    """Processes on each node."""

    @property
    def command(self) -> list[str]:
        """Arguments of `drivetrain` that start the training on each node."""
        words = ["train", *self.arguments]
        if self.nproc > 1 or self.nodes > 1:
            words += ["--nproc", str(self.nproc)]
        if self.nodes > 1:
            words += ["--nnodes", str(self.nodes), "--rdzv-backend", "c10d"]
        return words

    def meeting(self, host: str, run_id: str) -> list[str]:
        """Arguments after `command` by which several nodes meet at `host`; none for one node."""
        if self.nodes == 1:
            return []
        return ["--rdzv-endpoint", f"{host}:{_PORT}", "--rdzv-id", run_id]


def job_of(
    arguments: Sequence[str],
    given: Mapping[str, Any],
    name: str | None,
    nodes: int,
    nproc: int,
    *,
    gpus: bool = False,
    here: bool = True,
) -> Job:
    """A job that resumes its run when it is started again. `given`: the arguments by the names of
    the parameters of `drivetrain train`. `gpus`: True if the job has some. `here`: True if its
    files are on this machine. Raises `UsageError` as `drivetrain train` would.
    """
    for option, without in _OURS.items():
        if given[option] != without:
            raise SettingError(
                f"--{option.replace('_', '-')} is among the arguments of train, and the job sets "
                "it: use the options of `drivetrain launch` before the --"
            )
    out = given["out"]
    if out is None:
        raise SettingError(
            "a job that is started again needs its run folder: give --out after the --"
        )
    check_arguments(given, nodes * nproc, gpus, here)
    resuming = () if given["resume"] is not None else ("--resume", "auto")
    return Job(
        name=_file_name(name or PurePosixPath(out).name),
        arguments=(*arguments, *resuming),
        out=out,
        nodes=nodes,
        nproc=nproc,
    )


def _file_name(text: str) -> str:
    """Return a name for the job and its file, without characters that a shell or a program
    interprets. Raises `SettingError`."""
    found = re.sub(r"[^\w.-]+", "-", text).lstrip("-.")
    if not found:
        raise SettingError(f"a job cannot be called {text!r}; give --name, as in run-a")
    return found


def write(path: Path, text: str) -> None:
    """Write a file of the job. A file name in it that is not UTF-8 keeps its bytes. Raises
    `UsageError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        LOCAL.replace(path, text.encode(errors="surrogateescape"))
    except (OSError, UnicodeEncodeError) as error:
        raise UsageError(f"{path} cannot be written: {error}") from error


def as_argument(path: Path) -> str:
    """Return the path as an argument that no command takes for an option."""
    return posixpath.join(".", path) if str(path).startswith("-") else str(path)


def submit(command: Sequence[str]) -> str:
    """Submit a job, and return what the scheduler's program prints. Raises `UsageError`."""
    program = command[0]
    if shutil.which(program) is None:
        raise UsageError(
            f"--submit needs {program}, which is not on this machine; the file is written: run "
            f"`{shlex.join(command)}` where it is"
        )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"`{shlex.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()

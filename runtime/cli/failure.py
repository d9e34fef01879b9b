"""Failures of a command: one message on stderr and an exit code; a traceback only on request."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import typer
from rich.console import Console

from ..data.user_frames import last_line, user_frames
from ..kernel.errors import DataFailed, DrivetrainError, RecipeError, RecipeFailed
from ..trainer.recipe_checks import exit_called
from .quoted import quoted
from .stopping import StoppedEarly

__all__ = [
    "EXIT_INTERRUPTED",
    "FINISHED",
    "OUTCOMES",
    "PREEMPTED",
    "RESTARTS",
    "note_outcome",
    "rank",
    "say",
    "told",
    "world_size",
]

EXIT_INTERRUPTED = 130
OUTCOMES = "DRIVETRAIN_OUTCOMES"
"""Environment: the folder where ranks leave word of how they ended; the launcher reads it out."""
PREEMPTED = "preempted"
"""Left by a rank that saved and stopped; nothing is reported of it."""
FINISHED = "finished"
"""Left by a rank that finished: one that leaves nothing was ended by the user's code."""
RESTARTS = "DRIVETRAIN_RESTARTS"
"""Environment: set where the launcher may restart ranks, so that their end is not the run's."""


def rank() -> int:
    """This process's rank, as its launcher says."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Ranks in the run, as the launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def say(text: str, *, label: str = "", style: str = "") -> None:
    """One message on stderr, coloured on a terminal."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with suppress(OSError):  # it may go to a file on a disk that is full
        if label:
            console.print(label, style=style, end=" ", markup=False)
        console.print(quoted(text))


@contextmanager
def told(*, debug: bool = False) -> Iterator[None]:
    """Turn an error into its message and exit code. `debug` lets the traceback through too."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, (typer.Exit, typer.Abort)):
            raise
        if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
            raise  # nobody reads what is printed, as with `| head`
        code = _exit_code(error)
        message = _message(error)
        if debug:
            traceback.print_exc()
        if not note_outcome(code, message) or RESTARTS in os.environ:
            where = f" (rank {rank()})" if world_size() > 1 else ""
            say(message, label=f"error{where}:", style="bold red")
        raise typer.Exit(code) from error


def note_outcome(code: int, message: str) -> bool:
    """Leave word for the launcher, so that one message is printed however many ranks fail.
    False when no launcher of ours waits for it, or there is no room to."""
    folder = os.environ.get(OUTCOMES)
    if folder is None:
        return False
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    note = {
        "rank": rank(),
        "code": code,
        "message": message,
        "attempt": attempt,
        "time": time.time(),
    }
    try:
        Path(folder, f"{rank()}.json").write_text(json.dumps(note))
    except OSError:
        return False
    return True


def _exit_code(error: BaseException) -> int:
    if isinstance(error, StoppedEarly):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return error.exit_code if isinstance(error, DrivetrainError) else 1


def _message(error: BaseException) -> str:
    if isinstance(error, StoppedEarly):
        return str(error)
    if isinstance(error, DrivetrainError):
        users = type(error) in (DataFailed, RecipeError, RecipeFailed)
        blamed = error.__cause__ if users else None
        return f"{error}\n{user_frames(blamed) if blamed else ''}".rstrip()
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    frames = user_frames(error) or "--debug shows the traceback"
    return f"{_title(error)}\n{frames}"


def _title(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return exit_called(error)
    return last_line(error)

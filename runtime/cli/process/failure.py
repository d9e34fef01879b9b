"""Failures of a command: one message on stderr and an exit code; a traceback only on request."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ...data.user_frames import user_frames
from ...kernel.errors import (
    DataFailed,
    DrivetrainError,
    FailedAfterTraining,
    RecipeError,
    RecipeFailed,
)
from ...run.quoted import say
from ...trainer.recipe_checks import in_words
from .outcomes import RESTARTS, note_outcome, rank, world_size
from .stopping import StoppedEarly

__all__ = ["EXIT_INTERRUPTED", "reporting_errors"]

EXIT_INTERRUPTED = 130


@contextmanager
def reporting_errors(*, debug: bool = False) -> Iterator[None]:
    """Turn an error into a message and an exit code. `debug`: True to print the traceback, too."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, (typer.Exit, typer.Abort)):
            raise
        if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
            raise  # the reader of stdout is gone, as with `| head`
        code = _exit_code(error)
        message = _message(error)
        if debug:
            traceback.print_exc()
        if not note_outcome(code, message) or RESTARTS in os.environ:
            where = f" (rank {rank()})" if world_size() > 1 else ""
            say(message, label=f"error{where}:", style="bold red")
        raise typer.Exit(code) from error


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
        users = type(error) in (DataFailed, FailedAfterTraining, RecipeError, RecipeFailed)
        blamed = error.__cause__ if users else None
        return f"{error}\n{user_frames(blamed) if blamed else ''}".rstrip()
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    frames = user_frames(error) or "--debug shows the traceback"
    return f"{in_words(error)}\n{frames}"

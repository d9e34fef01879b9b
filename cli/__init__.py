"""The command line. It uses the kernel's public functions and adds nothing that they lack.

This module stays light, so that `drivetrain --help` answers at once; torch comes with a command.
"""

from __future__ import annotations

import os
import sys
import typing

__all__ = ["main"]


def main() -> None:
    """The console script `drivetrain`."""
    from .app import app

    try:
        app(prog_name="drivetrain")
    finally:
        for stream in (sys.stdout, sys.stderr):
            _let_go(stream)


def _let_go(stream: typing.TextIO) -> None:
    """What is left where the disk is full is lost: Python would change the exit code to 120."""
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())

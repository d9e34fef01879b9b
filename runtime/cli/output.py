"""Printing to a file on a disk that may be full."""

from __future__ import annotations

import errno
import os
import sys
from typing import TextIO

__all__ = ["let_go", "put_out"]


def put_out(text: str, stream: TextIO) -> None:
    """Print at once; what finds no room is printed with what follows, or lost."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:  # nobody looks any more
            raise


def let_go() -> None:
    """At the end, what is left is lost: Python would change the exit code to 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

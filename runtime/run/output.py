"""Output to a file on a disk that may be full."""

from __future__ import annotations

import errno
import os
import sys
from typing import TextIO

__all__ = ["drain_output", "write_now"]


def write_now(text: str, stream: TextIO) -> None:
    """Write and flush a text. If the disk is full, the text is written with later output, or
    lost."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader is gone
            raise


def drain_output() -> None:
    """Flush stdout and stderr before the exit, and drop output that cannot be written: otherwise
    Python would change the exit code to 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

"""Short paths for the sockets over which Python's processes send each other tensors.

multiprocessing makes these sockets in a folder within TMPDIR, and the path of a Unix socket has at
most 107 bytes: under a long TMPDIR no data worker and no rank can send a tensor. It imports the
standard library alone.
"""

from __future__ import annotations

import os
import tempfile
from multiprocessing import util

__all__ = ["keep_socket_paths_short"]

_MAX_BYTES = 107 - len("/pymp-12345678/listener-12345678")
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def keep_socket_paths_short() -> None:
    """Have multiprocessing make its folder elsewhere if TMPDIR is too long. Call it before
    processes are started: they inherit the folder, which this process removes at its exit."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) <= _MAX_BYTES:
        return
    for short in _SHORT:
        if os.path.isdir(short) and os.access(short, os.W_OK | os.X_OK):
            try:
                tempfile.tempdir = short
                util.get_temp_dir()  # multiprocessing remembers the folder that it makes
            finally:
                tempfile.tempdir = folder
            return

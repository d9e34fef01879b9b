"""Processes that ranks are forked from, which have imported what these need.

For each interpreter and list of packages there is one process that imports them, the template. It
forks a server for each process that connects, and a server forks ranks. Processes with the same
folder in `DRIVETRAIN_FORK_SERVERS` share templates, such as all workers of a test run.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

__all__ = ["SHARED", "ForkServer", "WorkerFailure", "last_words"]

SHARED = "DRIVETRAIN_FORK_SERVERS"
"""Environment variable with the folder of the sockets of templates. These end when it is removed.
Without it, the templates of this process are its own, and end with it.
"""

LOG_TAIL_BYTES = 6000


class WorkerFailure(Exception):
    """A rank raised, died or hung; the message holds what each rank left behind."""


class ForkServer:
    """A connection to a process that forks ranks. `import_path`: where a new template looks for its
    packages; ranks have paths of their own. `number`: templates of other numbers hash strings
    otherwise.
    """

    def __init__(self, python: str, import_path: str, packages: Sequence[str], number: int) -> None:
        command = [python, "-m", "drivetrain.conformance.worker"]
        key = json.dumps([command, __file__, list(packages), number])
        path = _folder() / hashlib.sha256(key.encode()).hexdigest()[:12]
        self.log = path.with_suffix(".log")
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self.channel = _connected(path)
            except (FileNotFoundError, ConnectionRefusedError):  # none yet, or it has ended
                _start(command, import_path, packages, path, self.log)
                self.channel = _connected(path)

    def fork(self, environment: Mapping[str, str], *files: int) -> int:
        """Fork a rank with that environment, and return its process id. `files`: descriptors for
        its jobs, its answers and its output.
        """
        return self._ask({"environment": dict(environment)}, files)

    def wait(self, pid: int) -> int:
        """Wait for a rank to end, and return its exit code."""
        return self._ask({"pid": pid}, ())

    @property
    def has_ended(self) -> bool:
        """True if the server is gone, such as by a signal."""
        try:
            return not self.channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:  # it has nothing to say
            return False
        except OSError:
            return True

    def _ask(self, request: Mapping[str, Any], files: Sequence[int]) -> int:
        with suppress(ConnectionError):  # a dead server is found when its answer is missing
            socket.send_fds(self.channel, [json.dumps(request).encode() + b"\n"], files)
            if answer := self.channel.recv(64):
                return int(answer)
        with self.log.open("rb") as log:
            raise WorkerFailure(f"the process that starts ranks has ended:\n{last_words(log)}")

    def close(self) -> None:
        """End the process. Its template stays."""
        with suppress(OSError):  # it has ended
            # a process forked from this one, such as a data worker, may hold the socket open
            self.channel.shutdown(socket.SHUT_WR)
            self.channel.recv(64)
        self.channel.close()


def last_words(log: IO[bytes]) -> str:
    """Return the last lines that a process printed."""
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - LOG_TAIL_BYTES))
    lines = log.read().decode(errors="replace").splitlines()
    return "\n".join(line for line in lines if not line.startswith("Extension modules:"))


_started: dict[Path, subprocess.Popen[bytes]] = {}
"""Templates that this process has started, by their sockets."""


def _folder() -> Path:
    shared = os.environ.get(SHARED)
    return Path(shared) if shared else Path(_own_folder().name)


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="drivetrain-")  # removed when this process ends


def _connected(path: Path) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX)
    try:
        channel.connect(str(path))
    except OSError:
        channel.close()
        raise
    return channel


def _start(
    command: Sequence[str], import_path: str, packages: Sequence[str], path: Path, log: Path
) -> None:
    """Start a template. The socket exists at once, so that clients wait while it imports."""
    path.unlink(missing_ok=True)
    if path in _started:
        _started.pop(path).wait()  # it has closed its socket
    with socket.socket(socket.AF_UNIX) as listener, log.open("ab") as output:
        listener.bind(str(path))
        listener.listen()
        _started[path] = subprocess.Popen(
            [*command, str(listener.fileno()), str(path), *packages],
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": import_path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(listener.fileno(),),
            start_new_session=True,
        )

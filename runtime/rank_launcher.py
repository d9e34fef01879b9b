"""Starts the ranks of a run that outlives its ranks, on one machine (`recover=in_place`).

torch's elastic agent ends all ranks when one dies. This launcher reports the death to the others,
by a pipe to each, and waits for them (`lost_ranks`).
"""

from __future__ import annotations

import json
import os
import queue
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from .kernel.errors import SettingError
from .lost_ranks import CHANNEL, Board, channel

__all__ = ["Ended", "Process", "RankLauncher"]

_IN_MEMORY = Path("/dev/shm")
_LOOK_SECONDS = 0.2
_GRACE_SECONDS = "600"
"""Time for the other ranks to save and end when one has failed, as text. torch's agent has the same
setting, `TORCH_ELASTIC_SHUTDOWN_TIMEOUT`."""


class Process(Protocol):
    """A process of a rank."""

    def wait(self) -> int:
        """Return its exit code once it has ended; negative for a signal."""

    def send_signal(self, number: int, /) -> None:
        """Send it a signal. Raises `ProcessLookupError`."""


@dataclass(frozen=True)
class Ended:
    """How the ranks ended."""

    failed_rank: int = 0
    exit_code: int = 0
    """The exit code of the first rank that failed; negative for a signal; 0 if none failed."""
    lost: tuple[int, ...] = ()
    """The ranks that died, and without which the others continued."""


class RankLauncher:
    """Starts `nproc` ranks, and waits for them. Signals may be sent to them meanwhile, also from a
    signal handler."""

    def __init__(self, nproc: int) -> None:
        self.nproc = nproc
        self._pipes: dict[int, int] = {}
        self._running: dict[int, Process] = {}
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._lost: list[int] = []
        self._gone: list[int] = []
        """All ranks that the others must do without: those that died, and had finished by then."""
        self._finished: list[int] = []

    def run(self, start: Callable[[Mapping[str, str], tuple[int, ...]], Process]) -> Ended:
        """Run all ranks to their end. `start(environment, descriptors)` starts one, with these
        variables in addition to those of this process, and these open descriptors.

        A rank that a signal ends is lost, and the others continue; a rank that fails ends the
        others, too."""
        with self._shared() as (environment, board, folder):
            try:
                for rank in range(self.nproc):
                    self._start(rank, start, environment, board, folder)
                return self._wait()
            finally:
                self.signal_all(signal.SIGKILL)  # of a launcher that was interrupted

    @contextmanager
    def _shared(self) -> Iterator[tuple[dict[str, str], int, str]]:
        """Make what the ranks share: the store, which lives here so that no rank takes it along,
        the board, and a folder."""
        if not (hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()):
            raise SettingError(
                "recover=in_place needs memory that ranks share, and the list of a process's "
                "connections, as Linux has them: leave it out"
            )
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10)
        )
        environment = {
            "WORLD_SIZE": str(self.nproc),
            "LOCAL_WORLD_SIZE": str(self.nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        }
        folder = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
        board = Board.create(self.nproc)
        with tempfile.TemporaryDirectory(prefix="drivetrain-", dir=folder) as in_memory:
            try:
                yield environment, board, in_memory
            finally:
                os.close(board)

    def _start(
        self,
        rank: int,
        start: Callable[[Mapping[str, str], tuple[int, ...]], Process],
        environment: Mapping[str, str],
        board: int,
        folder: str,
    ) -> None:
        reading, self._pipes[rank] = os.pipe()
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            CHANNEL: channel(reading, board, folder),
        }
        process = self._running[rank] = start({**environment, **own}, (reading, board))
        os.close(reading)

        def wait() -> None:
            self._ended.put((rank, process.wait()))

        threading.Thread(target=wait, name=f"drivetrain-rank-{rank}", daemon=True).start()

    def _wait(self) -> Ended:
        failed: tuple[int, int] | None = None
        deadline = float("inf")
        while self._running:
            if time.monotonic() > deadline:
                self.signal_all(signal.SIGKILL)
            with suppress(queue.Empty):
                rank, code = self._ended.get(timeout=_LOOK_SECONDS)
                del self._running[rank]
                os.close(self._pipes.pop(rank))
                if code == 0:
                    self._finished.append(rank)
                elif code < 0 and failed is None and self._running:
                    self._report(rank)
                elif failed is None:
                    failed = rank, code
                    grace = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _GRACE_SECONDS)
                    deadline = time.monotonic() + float(grace)
                    self.signal_all(signal.SIGTERM)
        return Ended(*(failed or (0, 0)), tuple(self._lost))

    def _report(self, rank: int) -> None:
        """Report a dead rank to the ranks that are left."""
        self._lost.append(rank)
        self._gone += [rank, *(each for each in self._finished if each not in self._gone)]
        line = json.dumps(self._gone).encode() + b"\n"
        for pipe in self._pipes.values():
            with suppress(BrokenPipeError):  # it has just died, too
                os.write(pipe, line)

    def signal_all(self, number: int) -> None:
        """Send a signal to the ranks that are left."""
        for process in list(self._running.values()):
            with suppress(ProcessLookupError):
                process.send_signal(number)

"""Starts the ranks of a run that outlives its ranks, on one machine (`recover=in_place`).

torch's elastic agent ends all ranks when one dies. This launcher reports the death to the others,
by a pipe to each, and waits for them (`lost_ranks`). With spares, it keeps as many processes ready
that take the places of dead ranks.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Protocol

from .kernel.errors import SettingError
from .lost_ranks import CHANNEL, SPARES, Board, Change, News, channel

__all__ = ["Ended", "Process", "RankLauncher"]

_IN_MEMORY = Path("/dev/shm")
_LOOK_SECONDS = 0.2
_END = "end\n"
_MOST_STARTED = 1024
"""Number of processes, ranks and spares, that one launcher starts at most."""
_GRACE_SECONDS = "600"
"""Time for the other ranks to save and end when one has failed, as text. torch's agent has the same
setting, `TORCH_ELASTIC_SHUTDOWN_TIMEOUT`."""


class Process(Protocol):
    """A process of a rank."""

    def wait(self) -> int:
        """Return its exit code once it has ended; negative for a signal."""

    def send_signal(self, number: int, /) -> None:
        """Send it a signal. Raises `ProcessLookupError`."""

    def error(self) -> str:
        """Return the message of its error, once it has ended; empty if it left none."""


@dataclass(frozen=True)
class Ended:
    """How the ranks ended."""

    failed_rank: int = 0
    exit_code: int = 0
    """The exit code of the first rank that failed; negative for a signal; 0 if none failed."""
    num_missing: int = 0
    """Number of ranks that died, and whose place no spare had taken at the end."""


Start = Callable[[Mapping[str, str], tuple[int, ...]], Process]
"""Starts a process, with these environment variables and open descriptors."""


class RankLauncher:
    """Starts `nproc` ranks, and waits for them. Signals may be sent to them meanwhile, also from a
    signal handler. `spares`: number of processes that are kept ready, each of which takes the place
    of a rank that dies."""

    def __init__(self, nproc: int, spares: int = 0) -> None:
        self.nproc, self.spares = nproc, spares
        self._pipes: dict[int, int] = {}
        self._running: dict[int, Process] = {}
        """The ranks."""
        self._waiting: dict[int, Process] = {}
        """The spares; `_ready` are those that wait for a place."""
        self._ready: list[int] = []
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._num_started = 0
        self._changes: list[Change] = []
        self._finished: list[int] = []
        self._failed: tuple[int, int] | None = None
        self._is_ending = False
        """True once a rank has finished or failed, or was asked to stop: no spare is needed."""
        self._deadline = float("inf")
        self._joined_at = -2
        """Number of steps that the run had made when a spare joined last."""

    def run(self, start: Start) -> Ended:
        """Run all ranks to their end. `start(environment, descriptors)` starts one, with these
        variables in addition to those of this process, and these open descriptors.

        A rank that a signal ends is lost, and the others continue; a rank that fails ends the
        others, too."""
        with self._shared() as begin:
            self._begin = partial(begin, start)
            try:
                for _ in range(self.nproc):
                    self._start(self._running)
                self._start_spares()
                return self._wait()
            finally:
                # the ranks of a launcher that was interrupted, and spares, which have done nothing
                self.signal_all(signal.SIGKILL)
                for spare in self._waiting.values():
                    with suppress(ProcessLookupError):
                        spare.send_signal(signal.SIGKILL)
                while self._waiting:
                    self._events.get()()

    @contextmanager
    def _shared(self) -> Iterator[Callable[[Start, int, int], Process]]:
        """Make what the ranks share: the store, which lives here so that no rank takes it along,
        the board, the pipe to this process, and a folder. Yield what starts a process, by its
        number and the pipe that it reads."""
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
            SPARES: str(self.spares),
        }
        folder = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
        shared = Board.create(_MOST_STARTED)
        self._board = Board(shared)
        reading, writing = os.pipe()
        with tempfile.TemporaryDirectory(prefix="drivetrain-", dir=folder) as in_memory:

            def begin(start: Start, number: int, pipe: int) -> Process:
                own = {
                    "RANK": str(number),
                    "LOCAL_RANK": str(number),
                    CHANNEL: channel(pipe, writing, shared, in_memory),
                }
                return start({**environment, **own}, (pipe, writing, shared))

            listening = threading.Thread(target=self._listen, args=(reading,), daemon=True)
            listening.start()
            try:
                yield begin
            finally:
                os.write(writing, _END.encode())
                listening.join()
                self._board.close()
                for descriptor in (shared, writing, reading):
                    os.close(descriptor)

    def _listen(self, pipe: int) -> None:
        """Receive what the processes report, in a thread of its own."""
        with os.fdopen(os.dup(pipe)) as lines:
            for word, number in map(str.split, iter(lines.readline, _END)):
                act = self._note_ready if word == "ready" else self._admit
                self._events.put(partial(act, int(number)))

    def _start(self, those: dict[int, Process]) -> None:
        """Start a process, and count it among `those`: the ranks, or the spares."""
        number, self._num_started = self._num_started, self._num_started + 1
        reading, self._pipes[number] = os.pipe()
        process = those[number] = self._begin(number, reading)
        os.close(reading)

        def wait() -> None:
            self._events.put(partial(self._note_end, number, process.wait()))

        threading.Thread(target=wait, name=f"drivetrain-rank-{number}", daemon=True).start()

    def _start_spares(self) -> None:
        """Start as many spares as are missing, once the run has made a step since one has joined:
        starting them slows the ranks down, and a step that ends each rank ends the run."""
        while len(self._waiting) < self.spares and self._num_started < _MOST_STARTED:
            if self._step() == self._joined_at:
                break
            self._start(self._waiting)

    def _step(self) -> int:
        """Return the number of steps that the run has made; -1 before the first is known."""
        notes = map(self._board.read, range(self._num_started))
        return max((note.step for note in notes if note is not None), default=-1)

    def _wait(self) -> Ended:
        while self._running:
            if time.monotonic() > self._deadline:
                self.signal_all(signal.SIGKILL)
            with suppress(queue.Empty):
                self._events.get(timeout=_LOOK_SECONDS)()
            if not self._is_ending:
                self._start_spares()
        return Ended(*(self._failed or (0, 0)), self._num_missing)

    def _note_end(self, number: int, code: int) -> None:
        """Note that a process has ended."""
        os.close(self._pipes.pop(number))
        if (spare := self._waiting.pop(number, None)) is not None:
            self._lose_spare(number, code, spare.error())
            return
        del self._running[number]
        if code == 0:
            self._is_ending = True
            self._finished.append(number)
        elif code < 0 and self._failed is None and self._running:
            self._changes.append(("lost", number))
            gone = [number for _, number in self._changes]
            self._changes += [("lost", each) for each in self._finished if each not in gone]
            self._replace()
            self._report()
        elif self._failed is None:
            self._failed, self._is_ending = (number, code), True
            grace = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _GRACE_SECONDS)
            self._deadline = time.monotonic() + float(grace)
            self.signal_all(signal.SIGTERM)

    def _lose_spare(self, number: int, code: int, error: str) -> None:
        """Continue without spares: one that cannot start would be started for ever."""
        if self._is_ending:
            return
        self.spares = 0
        was_ready = number in self._ready
        self._ready = [each for each in self._ready if each != number]
        when = "while it waited" if was_ready else "before it was ready"
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        sys.stderr.write(
            f"warning: a spare ended with {how} {when}: {error or 'it left no message'}\n"
            "no further spare is started\n"
        )
        if was_ready:
            self._report()

    @property
    def _num_missing(self) -> int:
        lost = {number for kind, number in self._changes if kind == "lost"}
        joined = [number for kind, number in self._changes if kind == "joined"]
        return len(lost.difference(self._finished)) - len(joined)

    @property
    def _has_place(self) -> bool:
        """True if a spare may join."""
        return bool(self._num_missing) and not self._is_ending

    def _replace(self) -> None:
        """Give the free places to the spares that are ready."""
        while self._ready and self._has_place:
            number = self._ready.pop(0)
            self._running[number] = self._waiting.pop(number)
            self._changes.append(("joined", number))
            self._joined_at = self._step()

    def _note_ready(self, number: int) -> None:
        """Note that a spare waits for a place."""
        if number in self._waiting:
            self._ready.append(number)
            if self._has_place:
                self._report()

    def _admit(self, num_changes: int) -> None:
        """Let spares join at the end of a step, of which the first rank reports that it is over.
        `num_changes`: the changes that this rank has followed."""
        if num_changes == len(self._changes):
            self._replace()
            if num_changes == len(self._changes):  # a spare has died meanwhile
                self._changes.append(("none", -1))
            self._report()

    def _report(self) -> None:
        """Report to all ranks and spares how the ranks have changed."""
        line = News(tuple(self._changes), bool(self._ready) and self._has_place).line()
        for pipe in self._pipes.values():
            with suppress(BrokenPipeError):  # it has just died, too
                os.write(pipe, line)

    def signal_all(self, number: int) -> None:
        """Send a signal to the ranks that are left. It asks them to stop, or ends them."""
        self._is_ending = True
        for process in list(self._running.values()):
            with suppress(ProcessLookupError):
                process.send_signal(number)

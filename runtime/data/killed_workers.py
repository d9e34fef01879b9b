"""Keeps a killed worker from blocking the training process.

A process may be killed at any instruction. torch's loader shares two things with its workers that a
killed worker can leave blocked: the lock of the event that ends the workers, and the pipe of
results, if only the first part of a result was written. The training process would then wait for
either forever.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, cast

from .private_names import private_name

__all__ = ["context_of", "detach_death_handler", "ended", "notice_torn_results"]

SECONDS_BETWEEN_LOOKS = 1.0


class _Flag:
    """The part of `multiprocessing.Event` that torch's loader uses, without a lock."""

    def __init__(self, context: BaseContext) -> None:
        self._value: Any = context.RawValue(ctypes.c_bool, False)

    def is_set(self) -> bool:
        return bool(self._value.value)

    def set(self) -> None:
        self._value.value = True


class _WorkerContext:
    def Event(self: Any) -> _Flag:
        return _Flag(self)

    def Process(self, *args: Any, **kwargs: Any) -> BaseProcess:
        process: Any = super().Process(*args, **kwargs)  # type: ignore[misc]
        process._Popen = functools.partial(_start, process._Popen)
        return cast(BaseProcess, process)


def _start(start: Any, process: BaseProcess) -> Any:
    """Start a worker whose `terminate`, which torch's loader and Python's exit call, sends SIGKILL:
    workers ignore SIGTERM."""
    started = start(process)
    started.terminate = started.kill
    return started


def context_of(start_method: str | None) -> BaseContext:
    """Return the context from which `DataLoader` gets processes and shared objects. None: the
    system's default start method.
    """
    kind = type(multiprocessing.get_context(start_method))
    context: BaseContext = type(f"Drivetrain{kind.__name__}", (_WorkerContext, kind), {})()
    return context


class _Results(Connection):
    """The end of a pipe from which results are read."""

    workers: Sequence[BaseProcess]

    def _recv(self, size: int, read: Any = None) -> Any:
        return super()._recv(size, self._part)  # type: ignore[misc]

    def _part(self, handle: int, size: int) -> bytes:
        while True:
            try:
                return os.read(handle, size)
            except BlockingIOError:
                if not (self.poll(SECONDS_BETWEEN_LOOKS) or self._all_live()):
                    raise EOFError("it ended while it sent a result") from None

    def _all_live(self) -> bool:
        return all(worker.is_alive() for worker in self.workers)


def notice_torn_results(iterator: Any) -> None:
    """Make a `DataLoader`'s iterator raise `EOFError` instead of waiting for the rest of a dead
    worker's result."""
    reader = iterator._worker_result_queue._reader
    os.set_blocking(reader.fileno(), False)
    reader.__class__ = _Results
    reader.workers = iterator._workers


def detach_death_handler(iterator: Any) -> None:
    """Exclude a `DataLoader`'s workers from torch's signal handler, which raises a worker's death
    wherever the main thread is. An earlier loader of this process may have installed the
    handler."""
    detach = private_name(
        "torch.utils.data._utils.signal_handling",
        "_remove_worker_pids",
        purpose="loading data in worker processes (data.workers)",
    )
    detach(id(iterator))
    iterator._worker_pids_set = False


def ended(workers: Sequence[BaseProcess]) -> list[tuple[int, BaseProcess]]:
    """Return the dead workers with their numbers; called after a worker failed. A broken pipe may
    be visible while the system is still ending its process, so this waits a moment."""
    ending = wait([worker.sentinel for worker in workers], SECONDS_BETWEEN_LOOKS)
    for worker in workers:
        if worker.sentinel in ending:
            worker.join()
    return [(number, worker) for number, worker in enumerate(workers) if not worker.is_alive()]

"""What keeps a worker that is killed from stopping the process that trains.

A kill may come at any instruction. torch's loader shares two things with its workers that one can
then leave taken: the lock of the event that ends them, and the pipe of their results, where the
first part of one waits for the rest. Who asks for either waits for ever.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

__all__ = ["context_of", "ended", "notice_torn_results"]

SECONDS_BETWEEN_LOOKS = 1.0


class _Flag:
    """As much of `multiprocessing.Event` as torch's loader uses, without a lock."""

    def __init__(self, context: BaseContext) -> None:
        self._value: Any = context.RawValue(ctypes.c_bool, False)

    def is_set(self) -> bool:
        return bool(self._value.value)

    def set(self) -> None:
        self._value.value = True


class _FlagForEvent:
    def Event(self: Any) -> _Flag:
        return _Flag(self)


def context_of(start_method: str | None) -> BaseContext:
    """Where `DataLoader` gets its processes and what they share. None: the system's own method."""
    kind = type(multiprocessing.get_context(start_method))
    context: BaseContext = type(f"Drivetrain{kind.__name__}", (_FlagForEvent, kind), {})()
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
    """From now on `EOFError` is raised where a `DataLoader`'s iterator would wait for the rest of
    what a worker sent that is gone."""
    reader = iterator._worker_result_queue._reader
    os.set_blocking(reader.fileno(), False)
    reader.__class__ = _Results
    reader.workers = iterator._workers


def ended(workers: Sequence[BaseProcess]) -> list[tuple[int, BaseProcess]]:
    """The numbers of the workers that are gone, and they; called where one has failed. What breaks
    off may be seen while the system still takes the process behind it apart: for that it waits."""
    ending = wait([worker.sentinel for worker in workers], SECONDS_BETWEEN_LOOKS)
    for worker in workers:
        if worker.sentinel in ending:
            worker.join()
    return [(number, worker) for number, worker in enumerate(workers) if not worker.is_alive()]

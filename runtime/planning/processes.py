"""Looks at several ways to place a run at the same time, in processes."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

from ..data.fork_gc import stay_forkable
from ..data.parent import end_with_parent
from ..kernel.errors import DrivetrainError
from ..trainer.gc_frozen import freeze
from ..trainer.time_accounting import num_cores
from .search import LeftOut, Planned, Search, Way

__all__ = ["look_at_all"]

_task: list[tuple[Search, Sequence[Way]]] = []
"""In a process that looks: the task of all of them."""


def look_at_all(search: Search, ways: Sequence[Way]) -> Iterator[list[Planned | LeftOut]]:
    """Yield what becomes of each way, in order. There is a process for each core; on a system that
    cannot fork safely they are looked at here. Raises `DrivetrainError` if a process dies."""
    number = min(num_cores(), len(ways))
    if number < 2 or sys.platform != "linux":
        yield from map(search.look, ways)
        return
    stay_forkable()
    context = multiprocessing.get_context("fork")  # recipes need not be picklable
    with ProcessPoolExecutor(number, context, _begin, (search, ways, os.getpid())) as pool:
        try:
            yield from pool.map(_look, range(len(ways)))
        except BrokenProcessPool as error:
            raise DrivetrainError(
                "a process that ran a step without memory has died, as when a machine has too "
                "little memory for the libraries that the drivers load; try one --backend at a time"
            ) from error


def _begin(search: Search, ways: Sequence[Way], parent: int) -> None:
    end_with_parent("a process that looks at ways to place a run: the one that started it", parent)
    torch.set_num_threads(1)  # a fork has lost the threads of operations
    freeze()
    _task[:] = [(search, ways)]


def _look(number: int) -> list[Planned | LeftOut]:
    ((search, ways),) = _task
    return search.look(ways[number])

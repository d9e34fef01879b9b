"""Looks at the ways of several drivers to place a run, in several processes at the same time."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch

from ..data.fork_gc import stay_forkable
from ..data.parent import end_with_parent
from ..kernel.contract import Driver
from ..kernel.errors import DrivetrainError
from ..kernel.optional import ListsOptions
from ..registry import find_driver, known_backends
from ..trainer.gc_frozen import freeze
from ..trainer.settings import Settings
from ..trainer.time_accounting import num_cores
from .search import LeftOut, Planned, Search, Way

__all__ = ["Found", "Lister", "Progress", "listing_drivers", "look_at_all", "look_at_drivers"]

Lister = tuple[Driver, Settings, Mapping[str, Any]]
"""A driver, the settings of its ways, and those of its options that are given."""
Progress = Callable[[int, int, int], None]
"""Takes the number of ways that were looked at, of all, and of those that fit."""


@dataclass(frozen=True)
class Found:
    """The ways of some drivers."""

    fits: Sequence[Planned]
    """The quickest first."""
    left_out: Sequence[LeftOut]


def listing_drivers() -> list[str]:
    """Return the names of the drivers that list ways to place a model, and can run here."""
    return [name for name in known_backends() if _lists(name)]


def _lists(name: str) -> bool:
    try:
        driver = find_driver(name)
    except DrivetrainError:
        return False
    return isinstance(driver, ListsOptions) and driver.probe().usable


def look_at_drivers(search: Search, listers: Iterable[Lister], progress: Progress) -> Found:
    """Return what becomes of all ways of these drivers. Raises `DrivetrainError` if a process
    dies."""
    ways: list[Way] = []
    found: list[Planned | LeftOut] = []
    for driver, settings, options in listers:
        listed = search.ways(driver, settings, options)
        if isinstance(listed, LeftOut):
            found.append(listed)
        else:
            ways += listed
    progress(0, len(ways), 0)
    for number, looked_at in enumerate(look_at_all(search, ways), 1):
        found += looked_at
        progress(number, len(ways), sum(isinstance(each, Planned) for each in found))
    fits = [each for each in found if isinstance(each, Planned)]
    fits.sort(key=lambda each: (each.estimate.seconds, each.total_bytes))
    return Found(fits, [each for each in found if isinstance(each, LeftOut)])


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

"""Threads that read a long stretch of a file in parts: one alone waits for the disk, and has new
memory given to it page by page."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from typing import TypeVar

__all__ = ["read_in_parts"]

_T = TypeVar("_T")

_NUM_READERS = min(8, os.cpu_count() or 1)


@cache
def _readers() -> ThreadPoolExecutor:
    """They stay: starting some for each tensor takes what they gain."""
    return ThreadPoolExecutor(_NUM_READERS, "read")


if hasattr(os, "register_at_fork"):  # a thread is not forked, and its work would not be done
    os.register_at_fork(after_in_child=_readers.cache_clear)


def read_in_parts(
    read: Callable[[int, int], _T], size: int, least: int, most: int | None = None
) -> list[_T]:
    """Call `read(first, last)` for parts of `size` bytes, side by side, and return what it returns,
    in order. There is a part for each thread, but none, save the last, is of fewer than `least`
    bytes, or else of more than `most`.

    None is read any more on return, by an error too; the first one's is raised. `read` itself must
    not call this for more than one part.
    """
    part_size = max(min(-(-size // _NUM_READERS), most or size), least)
    ends = [*range(0, size, part_size), size]
    if len(ends) <= 2:
        return [read(first, last) for first, last in pairwise(ends)]
    parts = [_readers().submit(read, first, last) for first, last in pairwise(ends)]
    try:
        return [part.result() for part in parts]
    finally:
        for part in parts:
            part.cancel()
        wait(parts)

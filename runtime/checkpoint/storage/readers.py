"""Threads that read a long part of a file in parallel: one thread alone would wait for the disk,
and for new memory page by page."""

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
    """Return the threads, which are kept: starting threads for each tensor would cost as much as
    they save."""
    return ThreadPoolExecutor(_NUM_READERS, "read")


if hasattr(os, "register_at_fork"):  # a fork has no copy of the threads
    os.register_at_fork(after_in_child=_readers.cache_clear)


def read_in_parts(
    read: Callable[[int, int], _T], size: int, least: int, most: int | None = None
) -> list[_T]:
    """Call `read(first, last)` in parallel for parts of `size` bytes, and return its results in
    order. There is one part for each thread, but no part is larger than `most` bytes, and none
    except the last is smaller than `least`.

    On return or error no part is still being read. The error of the first part that failed is
    raised. `read` itself must not call this function for more than one part.
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

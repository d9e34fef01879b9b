"""Forked processes, such as data workers, beside a backend that has threads."""

from __future__ import annotations

import gc
import os
from functools import cache


@cache
def leave_the_parents_garbage() -> None:
    """From now on a forked child never collects what its parent had: the end of a process group or
    of a device's runtime joins its threads, which no child has, and the child dies of that.

    `gc.freeze` is what https://docs.python.org/3/library/gc.html advises for the child of a fork.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)

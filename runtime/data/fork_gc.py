"""Forks of a process that has threads: data workers beside a backend, ranks beside their agent."""

from __future__ import annotations

import gc
import os
import threading
from functools import cache

import torch


@cache
def leave_the_parents_garbage() -> None:
    """Keep forked children, from now on, from collecting the garbage of their parent. The end of a
    process group, or of a device's runtime, joins its threads. A child has none of them, and dies.

    As https://docs.python.org/3/library/gc.html advises for forks: no collection until the child
    has frozen what there is.
    """
    if not hasattr(os, "register_at_fork"):
        return
    forking = threading.Lock()
    collects = True

    def before() -> None:
        nonlocal collects
        forking.acquire()
        collects = gc.isenabled()
        gc.disable()

    def after() -> None:
        if collects:
            gc.enable()
        forking.release()

    def after_in_child() -> None:
        gc.freeze()
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)


@cache
def stay_forkable() -> None:
    """Let autograd count the devices now, on a machine that has none. It counts once, and starts a
    thread for each, after which a fork of this process can compute no gradients. `torch.compile`
    and tensors without elements pretend that there is a GPU, from their first use on.

    Called after a driver's `open`, which may bring devices in.
    """
    if not torch.accelerator.is_available():
        torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]

"""The start of a loader's worker: its seed, its end, and its signals."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch.utils.data import get_worker_info

from ...data.parent import end_with_parent
from ...data.stop_signals import leave_to_parent
from ..common.seeding import set_seed

__all__ = ["begin_signalled_worker", "seed_worker"]


def seed_worker(worker_id: int, num_workers: int, rank: int) -> None:
    """Seed Python, NumPy and torch in a loader's worker, differently on each worker and rank. End
    the worker with the training process."""
    if get_worker_info() is not None:
        end_with_parent(f"data worker {worker_id}: the process that trains", os.getppid())
    set_seed((num_workers * rank + torch.initial_seed()) % 2**32)


def begin_signalled_worker(begin: Callable[[int], None] | None, worker_id: int) -> None:
    """Start a worker of a run that saves on a signal, which the training process handles."""
    leave_to_parent()
    if begin is not None:
        begin(worker_id)

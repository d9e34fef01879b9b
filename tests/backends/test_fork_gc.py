"""A data worker does not collect the garbage of the process that forked it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain import Recipe
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.subject import Subject


class WithThreads:
    """Garbage that only a collection finds. Like a process group, it must not be destroyed by a
    child.
    """

    def __init__(self, folder: str) -> None:
        self.itself, self.folder = self, Path(folder)

    def __del__(self) -> None:
        (self.folder / f"ended in {os.getpid()}").touch()


class Data:
    """Data that calls `fetching` for each sample."""

    def __init__(self, folder: str, fetching: Callable[[], Any] = int) -> None:
        self.folder, self.fetching = Path(folder), fetching

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        self.fetching()
        (self.folder / f"fetched in {os.getpid()}").touch()
        return torch.tensor([float(index)])


def fit(bench: Bench, data: Data) -> int:
    recipe = Recipe(
        model=lambda: nn.Linear(1, 1),
        loss=lambda module, batch: module(batch).sum(),
        train_data=data,
    )
    bench.fit(recipe, {"steps": 2, "global_batch": 4, "data.workers": 2})
    return os.getpid()


def worker_collects(bench: Bench, *, folder: str) -> int:
    """Collect garbage in a worker while it fetches samples."""
    gc.disable()  # or it would not be there any more
    WithThreads(folder)
    try:
        return fit(bench, Data(folder, gc.collect))
    finally:
        gc.enable()


def fork_collects(bench: Bench, *, folder: str) -> int:
    """Throw an object away just before the fork, and collect garbage before the worker begins."""

    def allocate() -> None:
        gc.set_threshold(1)
        [[[]] for _ in range(100)]

    os.register_at_fork(before=lambda: WithThreads(folder) and None, after_in_child=allocate)
    return fit(bench, Data(folder))


def ended_by_workers(job: Callable[..., int], folder: Path) -> list[str]:
    # options of its own: processes in which nothing has run yet
    parents = Subject("ddp", 2, {"device": "cpu"}).run(job, folder=str(folder))
    seen = {path.name for path in folder.iterdir()}
    assert sum("fetched" in name for name in seen) == 4
    ended = {name for name in seen if "ended" in name}
    return sorted(ended - {f"ended in {parent}" for parent in parents})


def test_no_collection_before_a_worker_begins(tmp_path: Path) -> None:
    assert not ended_by_workers(fork_collects, tmp_path)


def test_a_worker_does_not_end_its_parents_threads(tmp_path: Path) -> None:
    assert not ended_by_workers(worker_collects, tmp_path)

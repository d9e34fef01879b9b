"""A data worker leaves alone what the process that forked it had thrown away."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

from torch import nn

from drivetrain.conformance.bench import Bench
from drivetrain.conformance.subject import Subject
from drivetrain.kernel import Recipe


class WithThreads:
    """Garbage only a collection finds; as with a process group, a child must not end it."""

    def __init__(self, folder: str) -> None:
        self.itself, self.folder = self, Path(folder)

    def __del__(self) -> None:
        (self.folder / f"ended in {os.getpid()}").touch()


class Collecting:
    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        gc.collect()
        (self.folder / f"fetched in {os.getpid()}").touch()
        return [float(index)]


def fit(bench: Bench, *, folder: str) -> int:
    gc.collect()
    gc.disable()
    WithThreads(folder)
    try:
        recipe = Recipe(
            model=lambda: nn.Linear(1, 1),
            loss=lambda module, batch: module(batch).sum(),
            train_data=Collecting(folder),
            collate=_column,
        )
        bench.fit(recipe, {"steps": 2, "global_batch": 4, "data.workers": 2})
    finally:
        gc.enable()
    return os.getpid()


def _column(samples: list[list[float]]) -> Any:
    import torch

    return torch.tensor(samples)


def test_a_worker_does_not_end_its_parents_threads(tmp_path: Path) -> None:
    for parent in Subject("ddp", 2).run(fit, folder=str(tmp_path)):
        (tmp_path / f"ended in {parent}").unlink(missing_ok=True)
    seen = {path.name for path in tmp_path.iterdir()}
    assert sum("fetched" in name for name in seen) == 4
    assert not any("ended" in name for name in seen)

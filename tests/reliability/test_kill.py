"""kill -9 at any moment, the same command again: as if nothing had happened."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drivetrain.kernel.checkpoint import list_checkpoints, newest

from .runs import SETTINGS, everything, start, train, train_behind


def finish(
    backend: str, out: Path, num_ranks: int, how: Callable[..., None] = train
) -> dict[str, torch.Tensor]:
    ranks = start(backend, out, num_ranks, how)
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0] * num_ranks
    last = newest(out / "checkpoints")
    assert last is not None
    assert last.name == f"checkpoint-{SETTINGS.steps:06d}"
    return everything(last)


@pytest.mark.parametrize(
    ("backend", "num_ranks", "kills", "how"),
    [("cpu", 1, 12, train), ("cpu", 1, 10, train_behind), ("ddp", 2, 5, train_behind)],
)
def test_killed_runs_end_with_the_bits_of_an_uninterrupted_one(
    tmp_path: Path, backend: str, num_ranks: int, kills: int, how: Callable[..., None]
) -> None:
    whole = finish(backend, tmp_path / "whole", num_ranks)
    out = tmp_path / "killed"
    dice = random.Random(0)
    killed = furthest = 0
    while killed < kills:
        ranks = start(backend, out, num_ranks, how)
        # As each step saves, most of a run's time is inside a save. Half of the runs are killed
        # at the first sign of a new checkpoint, the others at some moment.
        wait_for_progress(out, dice.random() < 0.5, time.monotonic() + dice.uniform(0.0, 1.5))
        victim = dice.choice(ranks)
        victim.kill()
        for rank in ranks:  # the others notice, and end by themselves
            rank.join(60)
            assert rank.exitcode is not None
        killed += victim.exitcode == -signal.SIGKILL  # it may have ended before
        found = [step for step, _ in steps(out)]
        assert max(found, default=0) >= furthest, "a complete checkpoint was lost"
        furthest = max(found, default=0)
        if furthest >= SETTINGS.steps - 1:  # nothing is left to kill: begin again
            shutil.rmtree(out)
            furthest = 0
    killed_and_resumed = finish(backend, out, num_ranks, how)
    assert killed_and_resumed.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, killed_and_resumed[name]), name


def steps(out: Path) -> list[tuple[int, Path]]:
    return [(found.step, found.folder) for found in list_checkpoints(out / "checkpoints").complete]


def wait_for_progress(out: Path, on_progress: bool, until: float) -> None:
    folder = out / "checkpoints"
    before = set(os.listdir(folder)) if folder.is_dir() else set()
    while time.monotonic() < until:
        now = set(os.listdir(folder)) if folder.is_dir() else set()
        if on_progress and now != before:
            return
        time.sleep(0.001)

"""kill -9 at any moment, and the same command again: the run continues as if nothing had happened.

The quick part has ten kills. The slow part has DRIVETRAIN_KILLS of them, 200 by default:

    DRIVETRAIN_KILLS=200 python -m pytest -m slow tests/reliability/test_kill.py
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.checkpoint import checkpoints_of, list_checkpoints, newest

from .compat_runs import train_with_compat
from .dying import Death
from .runs import SETTINGS, Run, curve, everything, journal, start, train

KILLS = int(os.environ.get("DRIVETRAIN_KILLS", "200"))
CALLS = 150
"""Number of calls to the operating system in two or three saves."""
NUM_KILLS: list[tuple[Run, Callable[..., None], int]] = [
    (Run(), train, 5),
    (Run("ddp", 2, background=True), train, 3),
    (Run(), train_with_compat, 2),
]
"""Runs, the function that trains each, and its number of kills: ten in all."""
SLOW: list[tuple[Run, Callable[..., None], int]] = [
    (run, how, max(1, round(KILLS * share)))
    for run, how, share in [
        (Run(), train, 0.3),
        (Run(background=True), train, 0.2),
        (Run("ddp", 2), train, 0.1),
        (Run("ddp", 2, background=True), train, 0.1),
        (Run("fsdp", 2), train, 0.06),
        (Run("fsdp", 2, background=True), train, 0.04),
        (Run("deepspeed", 2, {"stage": 2}), train, 0.02),
        (Run("deepspeed", 2, {"stage": 3}), train, 0.02),
        (Run("deepspeed", 2, {"stage": 3}, background=True), train, 0.04),
        (Run(link_frozen=True), train, 0.04),
        (Run("fsdp", 2, link_frozen=True), train, 0.02),
        (Run("deepspeed", 2, {"stage": 3}, background=True, link_frozen=True), train, 0.02),
        (Run(), train_with_compat, 0.08),
        (Run("ddp", 2), train_with_compat, 0.04),
    ]
]


def name(value: Any) -> str:
    return str(getattr(value, "__name__", value))


@pytest.mark.parametrize(
    ("run", "how", "kills"),
    [*NUM_KILLS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=name,
)
def test_killed_runs_end_as_an_uninterrupted_one(
    tmp_path: Path, run: Run, how: Callable[..., None], kills: int
) -> None:
    whole = finish(run, tmp_path / "whole", how)
    out = tmp_path / "killed"
    dice = random.Random(f"{run} {kills}")
    killed = 0
    while killed < kills:
        before = newest_step(out)
        killed += was_killed(run, out, how, dice)
        assert newest_step(out) >= before, "a complete checkpoint was lost"
        resumed = [line["resumed"] for line in journal(out) if "resumed" in line]
        assert resumed == sorted(resumed), "it did not resume from the newest"
        if newest_step(out) >= SETTINGS.steps - 1:  # nothing is left to kill: begin again
            shutil.rmtree(out)
    killed_and_resumed = finish(run, out, how)
    assert killed_and_resumed.keys() == whole.keys()
    for key, tensor in whole.items():
        assert torch.equal(tensor, killed_and_resumed[key]), key
    assert curve(out) == curve(tmp_path / "whole")
    assert len(curve(out)) > SETTINGS.steps // SETTINGS.log_every - 1


def finish(run: Run, out: Path, how: Callable[..., None]) -> dict[str, torch.Tensor]:
    """Run to the end; return the tensors of the last checkpoint."""
    before = newest_step(out)
    ranks = start(run, out, run.num_ranks, how)
    for rank in ranks:
        rank.join(240)
    assert [rank.exitcode for rank in ranks] == [0] * run.num_ranks
    assert newest_step(out) == SETTINGS.steps
    if before >= 0:
        assert [line["resumed"] for line in journal(out) if "resumed" in line][-1] == before
    last = newest(checkpoints_of(out))
    assert last is not None
    return everything(last)


def was_killed(run: Run, out: Path, how: Callable[..., None], dice: random.Random) -> bool:
    """Start the run, and kill one rank or all: mostly in a call that the rank chooses itself, else
    at a random moment. Return False if the run ended before.
    """
    victim, all_of_them = dice.randrange(run.num_ranks), dice.random() < 0.5
    by_itself = dice.random() < 0.75
    if by_itself:
        # only rank 0 does more than write its own files
        at = dice.randint(1, CALLS if victim == 0 else CALLS // 3)
        death = Death(at, dice.choice(["before", "half-way", "after"]))
        run = replace(run, deaths={victim: death})
    ranks = start(run, out, run.num_ranks, how)
    if not by_itself:
        wait_for_progress(out, ranks)
        time.sleep(dice.uniform(0, 0.2))
        ranks[victim].kill()
    ranks[victim].join(120)
    for rank in ranks:
        if all_of_them:
            rank.kill()
        rank.join(60)  # where it was not killed, it notices, and ends by itself
        assert rank.exitcode is not None
    return ranks[victim].exitcode == -signal.SIGKILL


def newest_step(out: Path) -> int:
    complete = list_checkpoints(checkpoints_of(out)).complete
    return complete[-1].step if complete else -1


def wait_for_progress(out: Path, ranks: list[BaseProcess]) -> None:
    """Wait until something happens in the folder of checkpoints."""

    def look() -> list[str]:
        folder = checkpoints_of(out)
        return os.listdir(folder) if folder.is_dir() else []

    before = look()
    while look() == before and all(rank.is_alive() for rank in ranks):
        time.sleep(0.001)

"""A rank that does not come to the start, or dies in it, is named within the time of a step."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from drivetrain import Settings
from drivetrain.trainer.fit import fit

from .compat_runs import train_with_compat
from .runs import Run, recipe, start

SETTINGS = Settings(steps=2, global_batch=8, stall_seconds=2.0, timeout_seconds=9.0)


def train(case: tuple[str, int, str], out: Path, environment: dict[str, str]) -> None:
    """Train on one rank, with its output in a file. The victim ends before ranks meet, or while
    they do.
    """
    backend, victim, way = case
    os.environ.update(environment)
    words = os.open(out / environment["RANK"], os.O_WRONLY | os.O_CREAT)
    os.dup2(words, 2)
    if int(environment["RANK"]) == victim:
        if way == "is absent":
            os._exit(3)
        ends = os._exit if way == "dies" else lambda _: os.kill(os.getpid(), signal.SIGSTOP)

        def meet(*args: Any, **options: Any) -> None:
            time.sleep(1)  # the others have come
            ends(3)

        dist.init_process_group = meet
    if backend == "compat":
        train_with_compat(Run("ddp", 2), out, environment, **COMPAT)
        return
    fit(recipe(), replace(SETTINGS), backend=backend, out=out / "run")


COMPAT = {"stall_seconds": SETTINGS.stall_seconds, "ddp_timeout": int(SETTINGS.timeout_seconds)}


@pytest.mark.parametrize(
    ("backend", "victim", "way"),
    [
        ("ddp", 1, "is absent"),
        pytest.param("ddp", 0, "is absent", marks=pytest.mark.slow),
        pytest.param("fsdp", 1, "is stopped", marks=pytest.mark.slow),
        pytest.param("compat", 1, "dies", marks=pytest.mark.slow),
        pytest.param("compat", 0, "is absent", marks=pytest.mark.slow),
        pytest.param("deepspeed", 1, "is absent", marks=pytest.mark.slow),
        pytest.param("deepspeed", 0, "dies", marks=pytest.mark.slow),
        pytest.param("mesh", 1, "dies", marks=pytest.mark.slow),
        pytest.param("ddp", 0, "is stopped", marks=pytest.mark.slow),
    ],
)
def test_it_is_named(tmp_path: Path, backend: str, victim: int, way: str) -> None:
    """Require the victim's name. An absent rank may only be slow: the others wait until its time is
    up.
    """
    ranks = start((backend, victim, way), tmp_path, 2, train)
    other = ranks[1 - victim]
    stall = SETTINGS.stall_seconds or 0.0
    words = tmp_path / str(1 - victim)
    named = rf"[Rr]ank {victim}\b|in the process of rank {victim}\b"
    try:
        while not words.exists():  # the fork server imports
            assert other.is_alive()
            time.sleep(0.05)
        began = time.monotonic()
        while not re.search(named, words.read_text()):
            assert time.monotonic() - began < 60, words.read_text()
            time.sleep(0.1)
        other.join(60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    printed = words.read_text()
    assert other.exitcode == 1, printed
    assert (
        "in 'joining the process group'" in printed or "joining the process group failed" in printed
    )
    assert "Thread 0x" not in printed
    if victim or way == "is absent":  # torch prints stacks of its own where the store goes away
        assert "frame #" not in printed
    if way == "is absent":
        assert f"rank {victim} has kept others waiting for {stall:.0f} s" in printed
        assert "(timeout_seconds)" in printed.splitlines()[-1]

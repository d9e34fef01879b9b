"""Sessions begin together, and a process that runs one after another, such as a notebook, keeps
nothing of the last.
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from drivetrain.conformance.bench import Bench
from drivetrain.conformance.runs import run
from drivetrain.conformance.subject import Subject

SETTINGS = {"steps": 3, "global_batch": 8, "checkpoint.at_end": False}


def held_after_runs(bench: Bench) -> list[tuple[int, int]]:
    """Return the numbers of this process's threads and open files after each of four runs."""
    held = []
    for _ in range(4):
        run(bench, problem="language", samples=24, settings=SETTINGS)
        gc.collect()  # modules and their hooks hold each other
        held.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return held


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("ddp", {}),
        ("fsdp", {}),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("mesh", {"tensor": 2}),
                ("mesh", {"context": 2}),
                ("deepspeed", {"stage": 1}),
                ("deepspeed", {"stage": 3}),
            ]
        ),
    ],
)
def test_threads_and_files_of_sessions_do_not_add_up(backend: str, options: dict[str, Any]) -> None:
    """Compare from the second run on: torch remembers the mesh of the first. What the last session
    held is closed when the next one opens.
    """
    for held in Subject(backend, 2, options).run(held_after_runs, alone=True):
        grown = [last - second for second, last in zip(held[1], held[3], strict=True)]
        assert max(grown) < 3, held  # a group that is left behind has three threads


def opens_after_all_have_joined(bench: Bench, *, folder: str) -> bool:
    """Join late on rank 1. Return whether rank 1 had joined when the session opened."""
    joined, join = Path(folder, "joined"), dist.init_process_group

    def late(*arguments: Any, **more: Any) -> None:
        join(*arguments, **more)
        time.sleep(1.0)  # the other rank is connected, and need not wait
        joined.touch()

    if os.environ["RANK"] == "1":
        dist.init_process_group = late
    try:
        with bench.open():
            return joined.exists()
    finally:
        dist.init_process_group = join


def test_no_rank_leaves_while_another_joins(tmp_path: Path) -> None:
    """A rank that fails as soon as it has joined must not make others fail, whose message would
    then hide its own.
    """
    assert Subject("ddp", 2).run(opens_after_all_have_joined, folder=str(tmp_path)) == [True, True]

"""A rank that is killed after the last evaluation, when the run only has to end."""

from __future__ import annotations

import atexit
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from few_cases import only_quick
from torch import nn

from drivetrain import Parallel, Settings
from drivetrain.kernel.events import Evaluated
from drivetrain.trainer.fit import fit

from .runs import loss, recipe, start

SETTINGS = Settings(steps=2, global_batch=8, stall_seconds=60.0)
TENSOR = Parallel(tensor={"0": "column", "2": "row"})


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))


def train(backend: str, out: Path, environment: dict[str, str]) -> None:
    """Train on one rank, with its output in a file. Rank 1 is killed."""
    os.environ.update(environment)
    os.dup2(os.open(out / environment["RANK"], os.O_WRONLY | os.O_CREAT), 2)

    def die(event: Any) -> None:
        if isinstance(event, Evaluated) and environment["RANK"] == "1":
            (out / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    name, _, stage = backend.partition(" ")
    options = {"mesh": {"tensor": 2}, "deepspeed": {"stage": int(stage or 2)}}.get(name, {})
    what = replace(recipe(build), loss=loss, parallel=TENSOR if name == "mesh" else None)
    try:
        fit(
            what,
            SETTINGS,
            backend=name,
            backend_options=options,
            out=out / "run" if name == "ddp" or stage == "2" else None,  # or nothing is left to do
            observers=[die],
            finish=lambda module: None,
        )
    finally:
        atexit._run_exitfuncs()  # a fork does not by itself


@pytest.mark.parametrize(
    "backend", only_quick(("ddp", "fsdp", "mesh", "deepspeed 2", "deepspeed 3"), ("mesh",))
)
def test_the_other_names_it_soon(tmp_path: Path, backend: str) -> None:
    ranks = start(backend, tmp_path, 2, train)
    ranks[0].join(120)
    ended = time.time()
    for rank in ranks:
        rank.kill()
        rank.join()
    printed = (tmp_path / "0").read_text()
    assert [rank.exitcode for rank in ranks] == [1, -signal.SIGKILL], printed
    assert re.search(
        "CollectiveFailed: rank 0 .* ranks that did not arrive: 1", printed, re.IGNORECASE
    )
    assert ended - (tmp_path / "killed").stat().st_mtime < 20

"""kill -9 of one rank of two at a random moment, from the start of the process on: the other rank
names it within the time allowed, and shows no stacks of a library.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist
from torch import nn

from drivetrain import EvaluateSettings, Parallel, Settings
from drivetrain.backends.process_group import stall_watch
from drivetrain.backends.process_group.start import CONNECT_LIMIT
from drivetrain.trainer.fit import fit

from .compat_runs import train_with_compat
from .runs import Run, loss, recipe, start

DEATHS = int(os.environ.get("DRIVETRAIN_DEATHS", "12"))
SETTINGS = Settings(
    steps=40,
    global_batch=8,
    stall_seconds=3.0,
    timeout_seconds=12.0,
    evaluate=EvaluateSettings(every=10),
)
DRIVERS = ("ddp", "fsdp", "mesh", "deepspeed", "compat")


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))


def train(backend: str, out: Path, environment: dict[str, str]) -> None:
    """Train on one rank, with its output in a file."""
    os.environ.update(environment)
    os.dup2(os.open(out / environment["RANK"], os.O_WRONLY | os.O_CREAT), 2)
    if backend == "compat":
        run, times = Run("ddp", 2), {"stall_seconds": 3.0, "ddp_timeout": 12}
        train_with_compat(run, out / "run", environment, **times)
        return
    parallel = Parallel(tensor={"0": "column", "2": "row"}) if backend == "mesh" else None
    fit(
        replace(recipe(build), loss=loss, parallel=parallel),
        SETTINGS,
        backend=backend,
        backend_options={"tensor": 2} if backend == "mesh" else {},
        out=out / "run",
        finish=lambda module: None,
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(DEATHS))
def test_the_other_names_it(tmp_path: Path, seed: int) -> None:
    chance = random.Random(f"deaths {seed}")
    backend, victim = DRIVERS[seed % len(DRIVERS)], chance.randrange(2)
    ranks = start(backend, tmp_path, 2, train)
    other = ranks[1 - victim]
    time.sleep(chance.choice([chance.uniform(0, 0.5), chance.uniform(0, 6)]))
    ranks[victim].kill()
    began = time.monotonic()
    other.join(90)
    took = time.monotonic() - began
    for rank in ranks:
        rank.kill()
        rank.join()
    words = tmp_path / str(1 - victim)
    printed = words.read_text() if words.exists() else ""
    case = f"{backend}, rank {victim}, {took:.0f} s: {printed}"
    if other.exitcode == 0:  # it had ended, or had nothing left to do with the other
        return
    assert other.exitcode == 1, case
    if victim:  # torch prints stacks of its own where the store goes away
        assert "frame #" not in printed, case
    named = (f"rank {victim} ", f"did not arrive: {victim}", f"process of rank {victim}")
    assert any(name.lower() in printed.lower() for name in named), case
    assert took < 60, case


def die_in_the_mesh(backend: str, out: Path, environment: dict[str, str]) -> None:
    """Train on one rank. Rank 0, whose process serves the store, dies when both make groups of a
    mesh.
    """
    make, rank_0_dies = dist.device_mesh.new_group, RankZeroDies(out, environment["RANK"])  # type: ignore[attr-defined]

    def make_when_rank_0_is_dead(*args: Any, **kwargs: Any) -> Any:
        rank_0_dies()
        return make(*args, **kwargs)

    cast(Any, dist.device_mesh).new_group = make_when_rank_0_is_dead
    train(backend, out, environment)


def die_after_the_ranks_have_met(backend: str, out: Path, environment: dict[str, str]) -> None:
    """Train on one rank. Rank 0 dies before rank 1 connects to its store a second time, and before
    rank 1 is watched.
    """
    watching, rank_0_dies = stall_watch.watching, RankZeroDies(out, environment["RANK"])

    @contextmanager
    def watched(*args: Any, **kwargs: Any) -> Iterator[None]:
        if not kwargs.get("joins"):  # the group is there
            rank_0_dies()
        with watching(*args, **kwargs):
            yield

    cast(Any, stall_watch).watching = watched
    train(backend, out, environment)


class RankZeroDies:
    """A meeting of two ranks that rank 0 does not survive. Rank 1 continues afterwards."""

    def __init__(self, out: Path, rank: str) -> None:
        self.process, self.came, self.rank = out / "process-of-0", out / "came", rank
        if rank == "0":
            self.process.write_text(str(os.getpid()))

    def __call__(self) -> None:
        if self.rank == "0":
            while not self.came.exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        self.came.touch()
        while is_alive(int(self.process.read_text())):
            time.sleep(0.05)


def is_alive(process: int) -> bool:
    """Return False for a process that has ended, even if its parent has yet to ask for its end."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(") ")[2][0] not in "ZX"


@pytest.mark.parametrize(
    ("die", "call"),
    [
        (die_in_the_mesh, "creating the groups of the mesh"),
        (die_after_the_ranks_have_met, "connecting to the store"),
    ],
)
def test_a_rank_that_dies_with_the_store_is_named(
    tmp_path: Path, die: Callable[..., None], call: str
) -> None:
    """Require the name soon, whether the other rank is inside a call, or has yet to connect."""
    ranks = start("mesh", tmp_path, 2, die)
    ranks[0].join()
    began = time.monotonic()
    ranks[1].join()
    took = time.monotonic() - began
    printed = (tmp_path / "1").read_text()
    assert [rank.exitcode for rank in ranks] == [-signal.SIGKILL, 1], printed
    assert "rank 1 on " in printed and f"{call} failed" in printed
    assert "Ranks that did not arrive: 0" in printed
    assert took < CONNECT_LIMIT.total_seconds()

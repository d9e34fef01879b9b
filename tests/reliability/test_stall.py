"""A rank that stands still ends the run within the time set. The other ranks report which rank it
is, where, and in which code.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from few_cases import only_quick
from torch import Tensor, nn

from drivetrain import EvaluateSettings, Recipe, Settings, evaluate
from drivetrain.kernel.events import RankLate
from drivetrain.trainer.fit import fit

from .runs import build, loss, recipe, start

SETTINGS = Settings(
    steps=8,
    global_batch=8,
    stall_seconds=3.0,
    timeout_seconds=180.0,
    evaluate=EvaluateSettings(sanity_check=False),
)
LATE = replace(SETTINGS, timeout_seconds=8.0)
STEP = 4
"""The step in which a rank stands still; the first two are exempt."""


class Data(torch.utils.data.Dataset[Tensor]):
    """Data that stands still on one rank, in one way, when a sample of a later step is fetched."""

    def __init__(self, rank: int, way: str) -> None:
        self.plain: Any = recipe().train_data
        here, _, elsewhere = way.partition(", others ")
        self.way = here if os.environ.get("RANK") == str(rank) else elsewhere
        self.fetched = 0

    def __len__(self) -> int:
        return len(self.plain)

    def __getitem__(self, index: int) -> Tensor:
        self.fetched += 1
        if self.fetched == STEP * SETTINGS.global_batch // 2 and self.way:
            stand_still(self.way)
        sample: Tensor = self.plain[index]
        return sample


def stand_still(way: str) -> None:
    if way == "sleeps":
        time.sleep(600)
    if way == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if way == "naps":
        time.sleep(2.5 * (SETTINGS.stall_seconds or 0.0))
    if way == "dies":
        os._exit(3)
    if way.startswith("raises"):
        raise ValueError("a bad sample")
    if way == "works":
        until = time.monotonic() + 2 * (SETTINGS.stall_seconds or 0.0)
        while time.monotonic() < until:
            pass


class Sleepy(nn.Module):
    """A model that sleeps in a forward, on one rank or on all."""

    def __init__(self, rank: int, way: str) -> None:
        super().__init__()
        self.inner, self.way = build(), way
        self.awake = STEP if rank < 0 or os.environ.get("RANK") == str(rank) else 10**6

    def forward(self, inputs: Tensor) -> Tensor:
        self.awake -= 1
        if not self.awake:
            stand_still(self.way)
        result: Tensor = self.inner(inputs)
        return result


def train(backend: str, out: Path, environment: dict[str, str]) -> None:
    """Train on one rank, with its output in a file."""
    os.environ.update(environment)
    words = os.open(out / environment["RANK"], os.O_WRONLY | os.O_CREAT)
    os.dup2(words, sys.stderr.fileno())
    rank, way = int((out / "rank").read_text()), (out / "way").read_text()
    if way.startswith("calls "):
        what = replace(recipe(), model=lambda: Calling(way.partition(" ")[2]))
    elif way.endswith(" in a forward"):
        what = replace(recipe(), model=lambda: Sleepy(rank, way.partition(" ")[0]))
    else:
        what = Recipe(model=build, loss=loss, train_data=Data(rank, way))
    if way == "raises in an evaluation":
        evaluate(replace(what, eval_data={"same": what.train_data}), None, backend=backend)
    settings = LATE if way.startswith("sleeps") else SETTINGS
    if way == "raises":
        settings = replace(SETTINGS, stall_seconds=None)

    def note(event: Any) -> None:
        if isinstance(event, RankLate):
            (out / f"late-{environment['RANK']}").write_text(f"{event.rank} {event.what}")

    fit(what, settings, backend=backend, out=out / "run", observers=[note])


def run(backend: str, out: Path, rank: int, way: str) -> tuple[list[int | None], list[str], float]:
    """Return exit codes and outputs of both ranks, and the seconds since both had begun."""
    (out / "rank").write_text(str(rank))
    (out / "way").write_text(way)
    ranks = start(backend, out, 2, train)
    while not all((out / str(index)).exists() for index in range(len(ranks))):
        assert all(process.is_alive() for process in ranks)
        time.sleep(0.05)
    began = time.monotonic()
    waited_for = [process for index, process in enumerate(ranks) if not stopped(way, index, rank)]
    for process in waited_for:
        process.join(60)
    took = time.monotonic() - began
    for process in ranks:
        process.kill()
        process.join()
    return [p.exitcode for p in ranks], [(out / str(r)).read_text() for r in (0, 1)], took


class Calling(nn.Module):
    """A model whose forward makes a collective call on rank 0 that rank 1 leaves out."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.inner, self.call, self.forwards = build(), call, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards == STEP and os.environ["RANK"] == "0":
            call_alone(self.call)
        result: Tensor = self.inner(inputs)
        return result


def call_alone(call: str) -> None:
    if call == "barrier":
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(int(call)))


def stopped(way: str, index: int, rank: int) -> bool:
    """Return True for a rank that cannot end itself, so that the launcher must."""
    return way == "is stopped" and index == rank


@pytest.mark.parametrize(
    ("backend", "way"),
    only_quick(
        product(("ddp", "fsdp", "deepspeed"), ("sleeps", "is stopped", "sleeps in a forward")),
        [("ddp", "sleeps in a forward")],
    ),
)
def test_the_run_ends_and_says_who_and_where(tmp_path: Path, backend: str, way: str) -> None:
    """Require that the run ends soon for a stopped rank. A living one is named to all ranks, and
    the run ends when its time is up.
    """
    codes, words, took = run(backend, tmp_path, 1, way)
    assert codes == ([1, -signal.SIGKILL] if way == "is stopped" else [1, 1]), words
    assert took < SETTINGS.timeout_seconds / 2
    for rank in (0, 1) if way != "is stopped" else ():
        reported = (tmp_path / f"late-{rank}").read_text()
        assert re.match(
            r"1 it is at test_stall.py:\d+ in stand_still, called from .*rank 0 w", reported
        )
        assert took > LATE.timeout_seconds
        assert "has waited for 8 s (timeout_seconds)" in words[rank]
    assert re.search(r"[Rr]ank 1 stands still after \d steps, .*last seen at ", words[0])
    assert re.search(r"Rank 0 waits for it in .(a forward|averaging|gathering|adding)", words[0])
    if way != "is stopped":  # its place is known, and its stacks
        assert re.search(r"last seen at test_stall.py:\d+ in stand_still", words[0])
        assert "What each thread is doing" in words[1]


@pytest.mark.parametrize(
    "call", ["1", *(pytest.param(c, marks=pytest.mark.slow) for c in ("barrier", "100000"))]
)
def test_a_call_that_a_rank_leaves_out_is_found(tmp_path: Path, call: str) -> None:
    """Require an error from either side: the rank that waits, or the rank that receives an
    unexpected message.
    """
    codes, words, took = run("ddp", tmp_path, 0, f"calls {call}")
    assert 0 not in codes
    assert took < SETTINGS.timeout_seconds / 2
    assert re.search(r"test_stall\.py.* in call_alone", words[0]), words
    assert re.search("Rank|rank|collective mismatch", words[1]), words


@pytest.mark.parametrize(
    ("rank", "way"),
    [
        (1, "raises"),
        pytest.param(0, "raises", marks=pytest.mark.slow),
        pytest.param(1, "raises in an evaluation", marks=pytest.mark.slow),
    ],
)
def test_the_other_ranks_report_why_a_rank_ended(tmp_path: Path, rank: int, way: str) -> None:
    """Require the reason, even if the ended process holds the store, or no rank is watched."""
    codes, words, took = run("ddp", tmp_path, rank, way)
    assert codes == [1, 1], words
    assert took < SETTINGS.timeout_seconds / 2
    assert words[rank].rstrip().endswith("ValueError: a bad sample")
    reported = words[1 - rank].splitlines()[-1]
    assert "CollectiveFailed" in reported and f"Rank {rank} ended by " in reported
    assert "ValueError: a bad sample" in reported


@pytest.mark.slow
def test_a_rank_that_receives_it_may_finish_what_it_does(tmp_path: Path) -> None:
    """Let the other rank sleep for longer than a call takes to fail. Its next call fails."""
    codes, words, _ = run("ddp", tmp_path, 1, "raises, others naps")
    assert codes == [1, 1], words
    assert "CollectiveFailed" in words[0].splitlines()[-1]
    assert "Rank 1 ended by " in words[0] and "What each thread" not in words[0]


def test_an_error_on_all_ranks_is_its_own_on_each(tmp_path: Path) -> None:
    codes, words, _ = run("ddp", tmp_path, -1, "raises in a forward")
    assert codes == [1, 1], words
    for reported in words:
        assert reported.rstrip().endswith("ValueError: a bad sample")
        assert "CollectiveFailed" not in reported and "What each thread" not in reported


def test_a_call_that_fails_leaves_the_records_of_the_library(tmp_path: Path) -> None:
    codes, words, _ = run("ddp", tmp_path, 1, "dies")
    assert codes == [1, 3], words
    records = json.loads((tmp_path / "run" / "flight-records-rank-0.json").read_text())
    assert "all_reduce" in str(records) or "allreduce" in str(records), records


@pytest.mark.slow
def test_the_rank_with_the_store_is_stopped(tmp_path: Path) -> None:
    codes, words, took = run("ddp", tmp_path, 0, "is stopped")
    assert codes == [-signal.SIGKILL, 1]
    assert took < SETTINGS.timeout_seconds / 2
    assert "does not answer; rank 1 waits in" in words[1]


@pytest.mark.parametrize(
    ("backend", "rank", "way"),
    [
        ("ddp", 1, "works"),
        pytest.param("ddp", 0, "naps in a forward", marks=pytest.mark.slow),
        pytest.param("fsdp", -1, "naps in a forward", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_lives_is_waited_for(tmp_path: Path, backend: str, rank: int, way: str) -> None:
    """Delay a rank that works, a rank in the user's code, or all at once."""
    codes, words, _ = run(backend, tmp_path, rank, way)
    assert codes == [0, 0], words
    named = sorted(path.name for path in tmp_path.glob("late-*"))
    assert named == (["late-0", "late-1"] if rank >= 0 else [])

"""kill -9 of ranks at any point of a run: with `recover=in_place` the others continue in their
processes, and the run ends as if nothing had happened.

The quick part has one run for each point. The slow part has DRIVETRAIN_RECOVERIES kills, 60 by
default, at random points:

    DRIVETRAIN_RECOVERIES=200 python -m pytest -m slow tests/reliability/test_recover.py
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import drivetrain
from drivetrain import (
    Batches,
    DataSettings,
    EvaluateSettings,
    lost_ranks,
)
from drivetrain.checkpoint import checkpoints_of, list_checkpoints, newest
from drivetrain.kernel.errors import CapabilityRefused, RecipeFailed, SettingError
from drivetrain.kernel.events import StepEnded

from .dying_commands import Command, is_running
from .dying_ranks import (
    HYBRID,
    POINTS,
    SETTINGS,
    UNDISTURBED,
    Death,
    Dying,
    check_same_course,
    data,
    recipe,
    records,
    train,
)

RECOVERIES = int(os.environ.get("DRIVETRAIN_RECOVERIES", "60"))


@pytest.mark.few(3)
@pytest.mark.parametrize("point", POINTS)
def test_the_others_continue_as_if_nothing_had_happened(
    tmp_path: Path, whole: Path, point: str
) -> None:
    first = Death(point, 8, 1 + POINTS.index(point) % 2)  # a step with a log, evaluation and save
    second = Death(point, 16, 0)  # shows progress, and writes the run folder
    result = train(tmp_path / "run", first, second)
    assert result.step == 24
    check_same_course(tmp_path / "run", whole, [first.rank, 0])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "deaths",
    [
        [Death("forward", 8, 0), Death("forward", 8, 2)],
        [Death("forward", 8, 0), Death("building", 7, 1)],
        [Death("building", 0, 0)],
    ],
    ids=["at once", "while the others meet", "before the first step"],
)
def test_further_deaths(tmp_path: Path, whole: Path, deaths: list[Death]) -> None:
    assert train(tmp_path / "run", *deaths).step == 24
    check_same_course(tmp_path / "run", whole, [death.rank for death in deaths])


def test_a_stopped_rank_is_cut_off(tmp_path: Path, whole: Path) -> None:
    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    settings = replace(SETTINGS, stall_seconds=2.0)
    result = train(tmp_path / "run", Death("backward", 8, 1), settings=settings, act=stop)
    assert result.step == 24
    check_same_course(tmp_path / "run", whole, [1])


def test_with_too_few_ranks_left_it_saves_and_stops(tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "run"
    settings = replace(SETTINGS, max_lost=1)
    result = train(out, Death("forward", 6, 1), Death("forward", 10, 2), settings=settings)
    assert (result.reason, result.step) == ("preempted", 9)
    last = newest(checkpoints_of(out))
    assert last is not None and last.name.endswith("000009")
    resumed = drivetrain.fit(
        recipe(Dying((), launched=0)),
        replace(UNDISTURBED, log_every=2),
        backend="cpu",
        out=out,
        resume="auto",
        progress=False,
    )
    assert resumed.step == 24
    check_same_course(out, whole, [1, 2])


def test_a_death_right_after_a_resume(tmp_path: Path, whole: Path) -> None:
    """The log, evaluation and save that the run before has made are not made again."""
    out = tmp_path / "run"
    train(out, settings=replace(UNDISTURBED, steps=8))
    done = len(records(out, "logged")), len(records(out, "evaluated"))
    dying = Dying((Death("forward", 9, 1),), step=8)
    drivetrain.fit(
        recipe(dying),
        SETTINGS,
        nproc=3,
        backend="ddp",
        out=out,
        resume="auto",
        observers=[dying],
        progress=False,
    )
    assert len(records(out, "logged")) == done[0] + 8
    assert len(records(out, "evaluated")) == done[1] + 4
    (reformed,) = records(out, "reformed")
    assert (reformed["step"], reformed["world_size"]) == (8, 2)


def test_an_error_of_one_rank_is_no_death(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("a mistake in the recipe")

    with pytest.raises(RecipeFailed, match=r"rank 1: ValueError: a mistake in the recipe"):
        train(tmp_path / "run", Death("forward", 6, 1), act=fail)
    assert not records(tmp_path / "run", "rank_lost")


def test_nothing_is_left_after_many_deaths(tmp_path: Path) -> None:
    """File descriptors, threads, child processes and files in memory, after each of five deaths."""
    counts, folders = tmp_path / "counts", tmp_path / "folders"
    deaths = [Death("backward", 3 + 3 * rank, rank) for rank in range(5)]

    class Counting(Dying):
        def __call__(self, event: Any) -> None:
            super().__call__(event)
            if isinstance(event, StepEnded) and self.launched == 5 and self.step % 3 == 1:
                threads = [thread.name for thread in threading.enumerate()]
                children = len(list(Path(f"/proc/{os.getpid()}/task").glob("*/children")))
                found = [len(os.listdir("/proc/self/fd")), len(threads), children]
                folders.write_text(str(lost_ranks.shared_folder()))
                with counts.open("a") as file:
                    file.write(json.dumps(found) + "\n")

    dying = Counting(tuple(deaths))
    drivetrain.fit(
        recipe(dying),
        replace(SETTINGS, evaluate=EvaluateSettings(at_end=False), steps=22),
        nproc=6,
        backend="ddp",
        out=tmp_path / "run",
        observers=[dying],
        progress=False,
    )
    found = [json.loads(line) for line in counts.read_text().splitlines()]
    assert len(records(tmp_path / "run", "reformed")) == 5
    with_two, last = found[5], found[-1]  # one rank alone has fewer
    assert all(a <= b for a, b in zip(last, found[1], strict=True)), found
    assert with_two[0] <= found[1][0], found
    assert not Path(folders.read_text()).exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(14))
def test_at_any_moment(tmp_path: Path, seed: int) -> None:
    """Ranks die at random moments, of runs with accumulation and saves in the background, every
    other one with a spare. With fsdp and no spare, the others return to a checkpoint after the
    second death."""
    dice = random.Random(f"recover {seed}")
    settings = replace(
        SETTINGS,
        micro_batch=dice.choice([None, 3]),
        steps=60,
        log_every=dice.choice([1, 4]),
        data=DataSettings(workers=dice.choice([0, 1])),
        checkpoint=replace(SETTINGS.checkpoint, background=dice.random() < 0.5, keep_last=99),
        spares=seed % 2,
    )
    train(tmp_path / "whole", settings=replace(settings, recover="restart", spares=0))
    for number in range(max(1, RECOVERIES // 20)):
        ranks = dice.sample(range(4), 2)
        steps = sorted(dice.sample(range(1, 58), 2))
        deaths = [Death("forward", step, rank) for step, rank in zip(steps, ranks, strict=True)]

        def soon() -> None:
            die = partial(os.kill, os.getpid(), signal.SIGKILL)
            threading.Timer(random.Random().uniform(0, 0.03), die).start()

        out = tmp_path / f"run {number}"
        on: Any = ("ddp", {}) if seed < 10 else HYBRID
        assert train(out, *deaths, settings=settings, nproc=4, on=on, act=soon).step == 60
        lost = [rank for record in records(out, "rank_lost") for rank in record["ranks"]]
        assert set(lost) <= set(ranks)  # one that was about to die may have finished
        check_same_course(out, tmp_path / "whole", lost, settings)


# --- what is refused -------------------------------------------------------------------------


def test_it_needs_a_launcher_that_reports_deaths(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"needs a launcher that reports dead ranks"):
        train(tmp_path / "run", nproc=1)
    assert not (tmp_path / "run").exists()


def test_max_lost_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"max_lost is 1, and recover is 'restart'"):
        train(tmp_path / "run", settings=replace(UNDISTURBED, max_lost=1), nproc=1)


def test_a_driver_whose_ranks_cannot_continue_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapabilityRefused, match=r"refuses recover=in_place: its ranks cannot con"):
        drivetrain.fit(
            recipe(Dying(())), SETTINGS, nproc=2, backend="mesh", out=tmp_path, progress=False
        )


def test_loaders_that_give_each_rank_its_own_samples_are_refused(tmp_path: Path) -> None:
    own = replace(recipe(Dying(())), train_data=Batches(DataLoader(data(), batch_size=8)))
    with pytest.raises(SettingError, match=r"a loader in Batches gives each rank samples of its"):
        drivetrain.fit(own, SETTINGS, nproc=2, backend="ddp", out=tmp_path, progress=False)


# --- the command line ------------------------------------------------------------------------


def test_the_command_continues_and_says_so(tmp_path: Path) -> None:
    with Command(tmp_path, "--set", "steps=60") as command:
        command.until(r"^step 5/60")
        os.kill(command.ranks()[1], signal.SIGKILL)
        command.until(r"rank 1 has died after step \d+: 2 ranks continue with the same batch")
        command.until(r"training stood still for \d+\.\d\d s, and nothing of it is lost")
        command.until(r"^step 30/60")
        os.kill(command.ranks()[0], signal.SIGKILL)
        command.until(r"rank 0 has died after step \d+: 1 rank continues")
        command.until(r"^step 60/60")
        rest = command.process.communicate()[0]
    assert command.process.returncode == 0, rest
    logged = [record["step"] for record in records(tmp_path / "run", "logged")]
    assert sorted(set(logged)) == list(range(1, 61))
    assert "standing still" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_a_signal_after_a_death_still_saves_and_stops(tmp_path: Path) -> None:
    with Command(tmp_path, "--set", "steps=4000") as command:
        command.until(r"^step 5/4000")
        os.kill(command.ranks()[2], signal.SIGKILL)
        command.until(r"training stood still")
        command.until(r"^step ")
        command.process.send_signal(signal.SIGTERM)
        command.until(r"SIGTERM: saving after this step")
        command.process.communicate()
    assert command.process.returncode == 75
    assert list_checkpoints(checkpoints_of(tmp_path / "run")).complete


@pytest.mark.slow
def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    with Command(tmp_path, "--set", "steps=4000") as command:
        command.until(r"^step 5/4000")
        ranks = command.ranks()
        command.process.kill()
        deadline = time.monotonic() + 60
        while any(map(is_running, ranks)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_running, ranks))


def test_options_of_torchrun_are_refused(tmp_path: Path) -> None:
    with Command(tmp_path, "--max-restarts", "2") as command:
        command.until(r"recover=in_place works on one machine, and its ranks are not started by")
        command.process.communicate()
    assert command.process.returncode == 2

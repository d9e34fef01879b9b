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
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # once here, not in each rank
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain import (
    Batches,
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    Recipe,
    Settings,
)
from drivetrain.checkpoint import CheckpointReader, checkpoints_of, list_checkpoints, newest
from drivetrain.kernel.errors import CapabilityRefused, RecipeFailed, SettingError
from drivetrain.kernel.events import Logged, Saved, StepEnded
from drivetrain.trainer.result import Result

RECOVERIES = int(os.environ.get("DRIVETRAIN_RECOVERIES", "60"))
POINTS = ("forward", "backward", "update", "between", "log", "evaluation", "save", "saved")
SETTINGS = Settings(
    steps=24,
    global_batch=16,
    log_every=2,
    evaluate=EvaluateSettings(every=4, sanity_check=False),
    checkpoint=CheckpointSettings(every=4, keep_last=9),
    recover="in_place",
)
UNDISTURBED = replace(SETTINGS, recover="restart")


@dataclass(frozen=True)
class Death:
    """A point of the run at which a rank dies, by the number that it was launched with."""

    point: str
    step: int
    rank: int


@dataclass
class Dying:
    """A recipe's functions, and an observer, that end their rank at some points."""

    deaths: tuple[Death, ...]
    step: int = 0
    """Steps done."""
    launched: int = -1
    """The number that this process was launched with."""
    act: Callable[[], None] = field(default=lambda: os.kill(os.getpid(), signal.SIGKILL))

    def at(self, point: str, step: int) -> None:
        if Death(point, step, self.launched) in self.deaths:
            self.act()

    def __call__(self, event: Any) -> None:
        if isinstance(event, StepEnded):
            self.step = event.step
            self.at("between", self.step)
        if isinstance(event, Logged):
            self.at("log", self.step)
        if isinstance(event, Saved):
            self.at("saved", self.step)

    def model(self) -> nn.Module:
        if self.launched < 0:
            self.launched = int(os.environ["RANK"])
        self.at("building", self.step)
        return Net(self)

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.at("forward", self.step + 1)
        found = (module(batch[0]) - batch[1]).square().sum()
        if found.requires_grad:
            found.register_hook(lambda gradient: self.at("backward", self.step + 1))
        return found

    def measure(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        self.at("evaluation", self.step)
        return {"loss": (module(batch[0]) - batch[1]).square().sum()}

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        optimizer.register_step_pre_hook(lambda *_: self.at("update", self.step + 1))
        return optimizer


class Net(nn.Module):
    """A model with a buffer that each forward in training changes, and state of its own, which a
    checkpoint holds. The ranks' buffers are equal at each step."""

    def __init__(self, dying: Dying) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.register_buffer("forwards", torch.zeros(()))
        self.dying = dying

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1
        return self.layers(inputs)

    def get_extra_state(self) -> Any:
        self.dying.at("save", self.dying.step)
        return {"any": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(203, 8, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def recipe(dying: Dying) -> Recipe:
    return Recipe(
        model=dying.model,
        loss=dying.loss,
        train_data=data(),
        eval_data={"same": data()},
        measure=dying.measure,
        optimizer=dying.optimizer,
    )


def train(
    out: Path, *deaths: Death, settings: Settings = SETTINGS, nproc: int = 3, **more: Any
) -> Result:
    dying = Dying(deaths, **more)
    return drivetrain.fit(
        recipe(dying),
        settings,
        nproc=nproc,
        backend="ddp",
        out=out,
        observers=[dying],
        progress=False,
    )


def records(out: Path, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def tensors(out: Path) -> dict[str, Tensor]:
    """Return the weights and moments of the last checkpoint."""
    last = newest(checkpoints_of(out))
    assert last is not None
    reader = CheckpointReader(last)
    return {
        f"{kind} {name}": reader.read(kind, name)
        for kind in ("weights", "optimizer")
        for name in reader.names(kind)
    }


def check_same_course(
    out: Path, whole: Path, lost: list[int], settings: Settings = SETTINGS
) -> None:
    """Check that a run that lost ranks went as the undisturbed one."""
    reported = [rank for record in records(out, "rank_lost") for rank in record["ranks"]]
    assert sorted(reported) == sorted(lost)
    for name, keys in {
        "logged": ["loss", "grad_norm", "learning_rate", "items", "samples", "skipped"],
        "evaluated": ["metrics"],
        "step_digests": ["first_sample", "samples", "batch", "epoch"],
    }.items():
        mine, theirs = records(out, name), records(whole, name)
        # a rank 0 that dies right after it has written a record leaves it to be written again
        steps = {record["step"] for record in theirs}  # one that was stopped has logged once more
        mine = list({r["step"]: r for r in mine if r["step"] in steps}.values())
        if name == "step_digests":  # a log that is written by the others has none
            assert len(mine) >= len(theirs) - len(lost)
            steps = {record["step"] for record in mine}
            theirs = [record for record in theirs if record["step"] in steps]
        assert [record["step"] for record in mine] == [record["step"] for record in theirs], name
        for one, other in zip(mine, theirs, strict=True):
            for key in keys:
                same = one[key] == other[key] or one[key] == pytest.approx(other[key], rel=1e-5)
                assert same, (name, one["step"], key, one[key], other[key])
    saved = {record["step"] for record in records(out, "saved") if not record["error"]}
    for step in {record["step"] for record in records(whole, "saved")}:
        # one that was under way in the background is made again, of the step by then
        again = settings.checkpoint.background and saved & set(range(step, step + 4))
        assert step in saved or again, step
    mine, theirs = tensors(out), tensors(whole)
    assert mine.keys() == theirs.keys()
    if settings.micro_batch is not None:  # a rank has more of them when it has more samples
        del mine["weights forwards"]
    for name, tensor in mine.items():
        assert torch.allclose(tensor, theirs[name], rtol=1e-4, atol=1e-6), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(out, settings=UNDISTURBED)
    return out


@pytest.mark.parametrize("point", POINTS)
def test_the_others_continue_as_if_nothing_had_happened(
    tmp_path: Path, whole: Path, point: str
) -> None:
    first = Death(point, 8, 1 + POINTS.index(point) % 2)  # a step with a log, evaluation and save
    second = Death(point, 16, 0)  # shows progress, and writes the run folder
    result = train(tmp_path / "run", first, second)
    assert result.step == 24
    check_same_course(tmp_path / "run", whole, [first.rank, 0])


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
    before = set(os.listdir("/dev/shm"))
    counts = tmp_path / "counts"
    deaths = [Death("backward", 3 + 3 * rank, rank) for rank in range(5)]

    class Counting(Dying):
        def __call__(self, event: Any) -> None:
            super().__call__(event)
            if isinstance(event, StepEnded) and self.launched == 5 and self.step % 3 == 1:
                threads = [thread.name for thread in threading.enumerate()]
                children = len(list(Path(f"/proc/{os.getpid()}/task").glob("*/children")))
                found = [len(os.listdir("/proc/self/fd")), len(threads), children]
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
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_at_any_moment(tmp_path: Path, seed: int) -> None:
    """Ranks die at random moments, of runs with accumulation and saves in the background."""
    dice = random.Random(f"recover {seed}")
    settings = replace(
        SETTINGS,
        micro_batch=dice.choice([None, 3]),
        steps=60,
        log_every=dice.choice([1, 4]),
        data=DataSettings(workers=dice.choice([0, 1])),
        checkpoint=replace(SETTINGS.checkpoint, background=dice.random() < 0.5, keep_last=99),
    )
    train(tmp_path / "whole", settings=replace(settings, recover="restart"))
    for number in range(max(1, RECOVERIES // 20)):
        ranks = dice.sample(range(4), 2)
        steps = sorted(dice.sample(range(1, 58), 2))
        deaths = [Death("forward", step, rank) for step, rank in zip(steps, ranks, strict=True)]

        def soon() -> None:
            die = partial(os.kill, os.getpid(), signal.SIGKILL)
            threading.Timer(random.Random().uniform(0, 0.03), die).start()

        out = tmp_path / f"run {number}"
        assert train(out, *deaths, settings=settings, nproc=4, act=soon).step == 60
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


def test_a_driver_that_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapabilityRefused, match=r"refuses recover=in_place: its ranks do not hold"):
        drivetrain.fit(
            recipe(Dying(())), SETTINGS, nproc=2, backend="fsdp", out=tmp_path, progress=False
        )


def test_loaders_that_give_each_rank_its_own_samples_are_refused(tmp_path: Path) -> None:
    own = replace(recipe(Dying(())), train_data=Batches(DataLoader(data(), batch_size=8)))
    with pytest.raises(SettingError, match=r"a loader in Batches gives each rank samples of its"):
        drivetrain.fit(own, SETTINGS, nproc=2, backend="ddp", out=tmp_path, progress=False)


# --- the command line ------------------------------------------------------------------------

SOURCE = """
import os, time, torch
from torch import nn
from torch.utils.data import TensorDataset
from drivetrain import Recipe

x = torch.randn(203, 8, generator=torch.Generator().manual_seed(3))

def loss(module, batch):
    time.sleep(0.01)
    return (module(batch[0]) - batch[1]).square().sum()

recipe = Recipe(
    model=lambda: nn.Linear(8, 1),
    loss=loss,
    train_data=TensorDataset(x, x.sum(1, keepdim=True)),
)
"""


class Command:
    """`drivetrain train` on three ranks, which continues without those that die."""

    def __init__(self, folder: Path, *more: str) -> None:
        (folder / "recipe.py").write_text(SOURCE)
        command = [sys.executable, "-m", "drivetrain.cli", "train", "recipe.py", "--nproc", "3"]
        command += ["--backend", "ddp", "--out", "run", "--plain", "--set", "recover=in_place"]
        command += ["--set", "log_every=1", "--set", "global_batch=12", *more]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        for each in [*self.ranks(), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def ranks(self) -> list[int]:
        """Return the process numbers of the ranks, in the order in which they were started."""
        found = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return sorted(int(word) for each in found for word in each.read_text().split())

    def until(self, pattern: str) -> str:
        """Read lines up to one that matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no {pattern!r} in {''.join(self.lines)}")


def test_the_command_continues_and_says_so(tmp_path: Path) -> None:
    with Command(tmp_path, "--set", "steps=60") as command:
        command.until(r"^step 5/60")
        os.kill(command.ranks()[1], signal.SIGKILL)
        command.until(r"rank 1 has died after step \d+: 2 ranks continue from there")
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


def is_running(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def test_options_of_torchrun_are_refused(tmp_path: Path) -> None:
    with Command(tmp_path, "--max-restarts", "2") as command:
        command.until(r"recover=in_place works on one machine, and its ranks are not started by")
        command.process.communicate()
    assert command.process.returncode == 2

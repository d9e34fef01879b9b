"""kill -9 of ranks of a run that keeps spares (`recover=in_place`, `spares`): a spare takes the
place of each, and the run ends as if nothing had happened."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drivetrain
from drivetrain import lost_ranks
from drivetrain.kernel.errors import CollectiveFailed, SettingError
from drivetrain.kernel.events import StepEnded
from drivetrain.trainer.recovery import Reformed, Rejoined

from .dying_commands import SOURCE, Command, is_running
from .dying_ranks import (
    HYBRID,
    POINTS,
    SETTINGS,
    UNDISTURBED,
    Death,
    Dying,
    check_same_course,
    each_point,
    recipe,
    records,
    train,
)

SPARE = replace(SETTINGS, spares=1)


@dataclass
class Late(Dying):
    """The same, where steps 13 and 21 begin once a spare waits or no rank is missing."""

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        while self.step in (12, 20) and lost_ranks.num_missing() and not lost_ranks.spare_waits():
            time.sleep(0.005)
        return super().loss(module, batch)


@pytest.mark.parametrize("on", [("ddp", {}), HYBRID], ids=["ddp", "fsdp"])
@each_point
def test_a_spare_takes_the_place_of_each_rank_that_dies(
    tmp_path: Path, whole: Path, point: str, on: Any
) -> None:
    nproc = 3 if on[0] == "ddp" else 4
    first = Death(point, 8, 1 + POINTS.index(point) % 2)
    second = Death(point, 16, 0)  # shows progress, and writes the run folder
    out = tmp_path / "run"
    result = train(out, first, second, settings=SPARE, nproc=nproc, on=on, kind=Late)
    assert result.step == 24
    check_same_course(out, whole, [first.rank, 0])
    assert [record["ranks"] for record in records(out, "rejoined")] == [[nproc], [nproc + 1]]
    (ended,) = records(out, "run_ended")
    assert ended["lost_ranks"] == 2
    reformed = records(out, "reformed")
    assert reformed[-1]["world_size"] == nproc
    assert {record["steps_back"] for record in reformed} == {0}


@pytest.mark.parametrize("on", [("ddp", {}), HYBRID], ids=["ddp", "fsdp"])
def test_a_spare_that_is_ready_later_joins_at_the_end_of_a_step(
    tmp_path: Path, whole: Path, on: Any
) -> None:
    """Two ranks die at once, and one spare is ready. The next one is started once there is a new
    step, and joins while each rank holds a part of its own: no call of a step is interrupted."""
    out, nproc = tmp_path / "run", 3 if on[0] == "ddp" else 4
    deaths = Death("forward", 8, 0), Death("forward", 8, 1)
    assert train(out, *deaths, settings=SPARE, nproc=nproc, on=on, kind=Late).step == 24
    check_same_course(out, whole, [0, 1])
    first, second = records(out, "rejoined")
    assert (first["step"], first["world_size"]) == (7, nproc - 1)
    assert 7 < second["step"] <= 15 and second["world_size"] == nproc
    assert [record["steps_back"] for record in records(out, "reformed")] == [0, 0]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "deaths",
    [
        [Death("forward", 8, 0), Death("building", 0, 3)],
        [Death("forward", 8, 0), Death("building", 7, 1)],
        [Death("building", 0, 1)],
    ],
    ids=["of the spare", "of another", "before the first step"],
)
def test_deaths_while_a_spare_joins(tmp_path: Path, whole: Path, deaths: list[Death]) -> None:
    assert train(tmp_path / "run", *deaths, settings=SPARE).step == 24
    check_same_course(tmp_path / "run", whole, [death.rank for death in deaths])


def test_a_spare_alone_does_not_begin_again(tmp_path: Path) -> None:
    """Both ranks die before the spare has the state: it cannot know how far the run had come."""
    deaths = Death("forward", 8, 0), Death("building", 7, 1)
    with pytest.raises(CollectiveFailed, match=r"start the run again with --resum"):
        train(tmp_path / "run", *deaths, settings=SPARE, nproc=2)
    assert max(record["step"] for record in records(tmp_path / "run", "logged")) <= 8


def test_with_a_spare_no_rank_is_missing(tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "run"
    result = train(out, Death("forward", 6, 1), settings=replace(SPARE, max_lost=0))
    assert (result.reason, result.step) == ("finished", 24)
    check_same_course(out, whole, [1])


@dataclass
class Noting(Dying):
    """Writes what each rank draws, knows and is in the steps after the death."""

    folder: Path = Path()
    seen: dict[str, Any] = field(default_factory=dict)

    def __call__(self, event: Any) -> None:
        super().__call__(event)
        if isinstance(event, Rejoined | Reformed):
            self.seen[type(event).__name__] = event.step
        if isinstance(event, StepEnded) and event.step == 12:
            drawn = {"drawn": float(torch.rand(())), "events": self.seen, "group": os.getpgid(0)}
            places = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
            torch.save({**drawn, **places}, self.folder / f"{self.launched}.pt")


def noted(folder: Path, **death: Any) -> dict[int, dict[str, Any]]:
    """Return by launched number what ranks note in a run in which rank 1 dies."""
    folder.mkdir()
    dies = [Death("forward", 8, 1)]
    train(folder / "run", *dies, settings=SPARE, kind=Noting, folder=folder, **death)
    return {int(path.stem): torch.load(path, weights_only=True) for path in folder.glob("*.pt")}


def test_a_rank_that_joins_has_a_place_and_random_numbers_of_its_own(tmp_path: Path) -> None:
    found = noted(tmp_path / "a")
    assert found.keys() == {0, 2, 3}
    assert {n: (each["RANK"], each["LOCAL_RANK"]) for n, each in found.items()} == {
        0: ("0", "0"),
        2: ("1", "2"),  # keeps its device
        3: ("2", "1"),  # has that of the dead rank
    }
    assert {each["WORLD_SIZE"] for each in found.values()} == {"3"}
    assert len({each["drawn"] for each in found.values()}) == 3
    assert {str(each["events"]) for each in found.values()} == {"{'Rejoined': 7, 'Reformed': 7}"}
    again = noted(tmp_path / "b")
    assert {n: each["drawn"] for n, each in again.items()} == {
        n: each["drawn"] for n, each in found.items()
    }


def test_no_process_is_left(tmp_path: Path) -> None:
    def children() -> set[str]:
        found = Path("/proc/self/task").glob("*/children")
        return {word for each in found for word in each.read_text().split()}

    before, files = children(), len(os.listdir("/proc/self/fd"))
    train(tmp_path / "run", Death("forward", 8, 1), settings=replace(SPARE, spares=2))
    deadline = time.monotonic() + 30
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not children() - before
    assert len(os.listdir("/proc/self/fd")) <= files + 2  # what the first run has opened stays


class Broken(list[Any]):
    """Observers that a spare of three ranks cannot have. It writes its process number."""

    def __init__(self, process: Path) -> None:
        super().__init__()
        self.process = process

    def __iter__(self) -> Any:
        if int(os.environ.get("RANK", "0")) > 2:
            self.process.write_text(f"{os.getpid()}\n")
            raise ValueError("no licence is left")
        return super().__iter__()

    def loss(self, module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """A loss that can be computed once the spare has ended."""
        while not self.process.exists() or not self.process.read_text().endswith("\n"):
            time.sleep(0.005)
        while is_running(int(self.process.read_text())):
            time.sleep(0.005)
        return (module(batch[0]) - batch[1]).square().sum()


def test_a_forked_spare_that_cannot_start_disturbs_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = Broken(tmp_path / "process")
    result = drivetrain.fit(
        replace(recipe(Dying(())), loss=broken.loss),
        replace(SPARE, steps=200),
        nproc=3,
        backend="ddp",
        observers=broken,
        progress=False,
    )
    assert result.step == 200
    printed = capfd.readouterr().err
    assert "a spare ended with exit code 1 before it was ready: ValueError: no licence" in printed


# --- the command line ------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_shows_that_a_spare_has_joined(tmp_path: Path) -> None:
    with Command(tmp_path, "--set", "steps=4000", "--set", "spares=1") as command:
        command.until(r"^step 5/4000")
        os.kill(command.ranks()[1], signal.SIGKILL)
        command.until(r"rank 1 has died after step \d+: 2 ranks continue with the same batch")
        command.until(r"a spare has joined after step \d+: 3 ranks share the batch")
        command.until(r"training stood still for \d+\.\d\d s, and nothing of it is lost")
        command.until(r"^step ")
        command.process.send_signal(signal.SIGTERM)
        command.until(r"^preempted at step \d+ after .*, in which 1 rank died")
        ranks = command.ranks()
        command.process.communicate()
    assert command.process.returncode == 75
    assert not any(map(is_running, ranks))


@pytest.mark.slow
def test_a_spare_that_cannot_start_disturbs_nothing(tmp_path: Path) -> None:
    broken = "if int(os.environ.get('RANK', 0)) > 2: raise ValueError('no licence is left')"
    source = SOURCE.replace("x = torch", f"{broken}\nx = torch")
    with Command(tmp_path, "--set", "spares=1", "--set", "steps=4000", source=source) as command:
        command.until(r"warning: a spare ended with exit code \d+ before it was ready: ")
        command.until(r"no licence is left")
        command.until(r"^step ")
        command.process.send_signal(signal.SIGTERM)
        command.process.communicate()
    assert command.process.returncode == 75
    assert len(command.ranks()) == 0


@pytest.mark.slow
def test_spares_that_the_launcher_does_not_know_are_refused(tmp_path: Path) -> None:
    source = f"{SOURCE}\nfrom drivetrain import Settings\nsettings = Settings(spares=1)\n"
    with Command(tmp_path, source=source) as command:
        command.until(r"spares is 1, and the launcher keeps 0 processes ready")
        command.process.communicate()
    assert command.process.returncode == 2


def test_spares_are_refused_on_a_rank_whose_launcher_keeps_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Require the same refusal in this process, as on a rank: the command takes far longer."""
    monkeypatch.setenv(lost_ranks.CHANNEL, "")
    monkeypatch.delenv(lost_ranks.SPARES, raising=False)
    with pytest.raises(SettingError, match="spares is 1, and the launcher keeps 0 processes ready"):
        train(tmp_path / "run", settings=SPARE, nproc=1)
    assert not (tmp_path / "run").exists()


def test_spares_without_recovery_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"spares is 1, and recover is 'restart': set recover="):
        train(tmp_path / "run", settings=replace(UNDISTURBED, spares=1), nproc=1)
    assert not (tmp_path / "run").exists()

"""Signals to a command: before it trains, while it ends, to its launcher, to one of its ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from command_line import Drive

from drivetrain.kernel.errors import EXIT_PREEMPTED

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
SEND = "import os, signal, time; os.kill(os.getpid(), signal.{})"


def name(number: int) -> str:
    return signal.Signals(number).name


@pytest.mark.parametrize("number", SIGNALS, ids=name)
def test_before_it_trains_there_is_nothing_to_save(
    drive: Drive, recipe: Path, tmp_path: Path, number: int
) -> None:
    recipe.write_text(f"{SEND.format(name(number))}\n{recipe.read_text()}")
    ran = drive("train", recipe, "--out", "run", "--json")
    assert ran.code == EXIT_PREEMPTED
    assert f"{name(number)} came before training began: nothing was done" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_that_ends_is_let_end(drive: Drive, recipe: Path) -> None:
    text = recipe.read_text().replace('return "a <sample>"', f"{SEND.format('SIGTERM')}; return ''")
    recipe.write_text(text)
    ran = drive("train", recipe, "--out", "run", "--json")
    assert ran.code == 0, ran.stderr
    assert ran.records()[-1]["reason"] == "finished"


def when_it_trains(folder: Path, act: Callable[[BaseProcess], None]) -> Callable[..., None]:
    def meanwhile(process: BaseProcess) -> None:
        while '"logged"' not in (folder / ".stdout").read_text():
            assert process.is_alive()
            time.sleep(0.05)
        act(process)

    return meanwhile


@pytest.mark.parametrize(
    "number",
    [signal.SIGUSR1, *(pytest.param(n, marks=pytest.mark.slow) for n in SIGNALS[:2])],
    ids=name,
)
def test_the_launcher_passes_it_on(drive: Drive, recipe: Path, tmp_path: Path, number: int) -> None:
    def send(process: BaseProcess) -> None:
        os.kill(process.pid or 0, number)

    words = ["--out=run", "--steps=1000000", "--nproc=2", "--json"]
    ran = drive("train", recipe, *words, meanwhile=when_it_trains(tmp_path, send))
    assert ran.code == EXIT_PREEMPTED, ran.stderr
    assert ran.records()[-1]["reason"] == "preempted"
    assert (tmp_path / ran.records()[-1]["checkpoint"] / "manifest.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_alone_is_told(drive: Drive, recipe: Path, rank: int) -> None:
    """It sends it to itself. Who ends first must not have the others ended before they have."""
    first = f"""
import os, signal
sent = []
def first():
    if os.environ.get("RANK") == "{rank}" and not sent:
        sent.append(os.kill(os.getpid(), signal.SIGTERM))
"""
    recipe.write_text(recipe.read_text().replace("batch: ", "batch: first() or ") + first)
    words = ["--out=run", "--steps=1000000", "--nproc=2", "--json"]
    ran = drive("train", recipe, *words)
    assert ran.code == EXIT_PREEMPTED, ran.stderr
    assert ran.records()[-1]["event"] == "result"
    assert ran.records()[-1]["reason"] == "preempted"


TOGETHER = "from drivetrain.trainer import signals\nsignals._TOGETHER_SECONDS = 0.2\n"


def test_a_second_one_to_the_launcher_stops_all(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    slow = "open(f'pid-{os.getpid()}', 'w').close() or time.sleep(600) or "
    text = recipe.read_text().replace(
        "loss=lambda module, batch: ", f"loss=lambda module, batch: {slow}"
    )
    recipe.write_text(f"import os, time\n{TOGETHER}{text}")

    def twice(process: BaseProcess) -> None:
        while len(list(tmp_path.glob("pid-*"))) < 2:
            assert process.is_alive()
            time.sleep(0.05)
        while process.is_alive():  # the first may come late
            os.kill(process.pid or 0, signal.SIGTERM)
            process.join(0.5)

    began = time.monotonic()
    ran = drive("train", recipe, "--out=run", "--nproc=2", meanwhile=twice)
    assert time.monotonic() - began < 90
    assert ran.code not in (0, EXIT_PREEMPTED), json.dumps(ran.stderr)
    none_lives_on([int(left.name.removeprefix("pid-")) for left in tmp_path.glob("pid-*")])


NAP = """
import os, time
def nap(index):
    if os.path.exists("asleep") and index % 2 == 0:
        open(f"pid-{os.getpid()}-worker", "w").close()
        time.sleep(600)
"""


def test_a_launcher_that_is_killed_takes_its_ranks_along(
    drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    """And their data workers, one of which is asleep in the data set. A restart goes on at once."""
    head = "def __getitem__(self, index):\n"
    text = recipe.read_text().replace(head, f"{head}        nap(index)\n")
    recipe.write_text(f"{text}{NAP}")
    (tmp_path / "asleep").touch()

    def kill(process: BaseProcess) -> None:
        while len(list(tmp_path.glob("pid-*"))) < 2 or len(children(process.pid)) < 2:
            assert process.is_alive()
            time.sleep(0.05)
        pids.extend(children(process.pid))
        process.kill()

    pids: list[int] = []
    words = ["--out=run", "--nproc=2", "--backend=ddp", "--resume=auto", "--set=data.workers=2"]
    drive("train", recipe, *words, meanwhile=kill)
    pids += [int(path.name.split("-")[1]) for path in tmp_path.glob("pid-*")]
    none_lives_on(pids)
    (tmp_path / "asleep").unlink()
    assert drive("train", recipe, *words).code == 0


def none_lives_on(pids: list[int]) -> None:
    """They are killed when their launcher ends: the kernel of the machine takes a moment for it."""
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if Path(f"/proc/{pid}/stat").exists()]:
        assert time.monotonic() < deadline, f"{alive} live on"
        time.sleep(0.1)


def children(process: int | None) -> list[int]:
    found: list[int] = []
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        found += map(int, listed.read_text().split())
    return found

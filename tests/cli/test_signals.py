"""Signals to a command: before it trains, while it ends, to its launcher, and to one of
its ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from command_line import Drive, when_it_trains

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


def cases() -> list[object]:
    """Return each signal, sent to the command alone, to one of its ranks, or to all processes as
    job queues do.
    """
    every = itertools.product(
        ("cpu", "ddp"), (0, 2), SIGNALS, ("the launcher", "one rank", "all processes")
    )
    quick = {
        ("ddp", 2, signal.SIGUSR1, "the launcher"),
        ("cpu", 2, signal.SIGTERM, "all processes"),
    }
    return [
        pytest.param(
            *case,
            id=f"{case[0]}-{case[1]} workers-{name(case[2])}-{case[3]}",
            marks=[] if case in quick else [pytest.mark.slow],
        )
        for case in every
        if (case[0], case[3]) != ("cpu", "one rank")
    ]


@pytest.mark.parametrize(("backend", "workers", "number", "whom"), cases())
def test_it_saves_and_stops(
    drive: Drive, recipe: Path, tmp_path: Path, backend: str, workers: int, number: int, whom: str
) -> None:
    def send(process: BaseProcess) -> None:
        ranks = children(process.pid) if backend == "ddp" else []
        below = [pid for rank in ranks for pid in children(rank)] or children(process.pid)
        pids = {"the launcher": [], "one rank": ranks[-1:], "all processes": [*below, *ranks]}[whom]
        for pid in pids if whom == "one rank" else [*pids, process.pid or 0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    words = [f"--backend={backend}", f"--nproc={1 if backend == 'cpu' else 2}"]
    words += ["--out=run", "--steps=1000000", f"--set=data.workers={workers}", "--json"]
    ran = drive("train", recipe, *words, meanwhile=when_it_trains(tmp_path, send))
    assert ran.code == EXIT_PREEMPTED, ran.stderr
    assert ran.records()[-1]["reason"] == "preempted"
    assert (tmp_path / ran.records()[-1]["checkpoint"] / "manifest.json").is_file()
    if whom != "one rank":
        again = "press" if number == signal.SIGINT else "signal"
        answer = f": saving after this step; {again} again to stop without saving"
        assert ran.stderr.count("saving after this step") == ran.stderr.count(answer) <= 1


IMPORTING = """
import os, signal, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.{})
sys.meta_path.insert(0, Finder)
sys.argv = ["drivetrain", "train"]
from drivetrain.cli import main
main()
"""


@pytest.mark.parametrize("number", SIGNALS, ids=name)
def test_while_torch_is_imported(tmp_path: Path, number: int) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTING.format(name(number))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == EXIT_PREEMPTED, ran.stderr
    assert ran.stderr == (
        f"error: {name(number)} came before training began: nothing was done, so nothing is saved. "
        "Run the same command again\n"
    )
    assert not list(tmp_path.iterdir())


def test_before_a_rank_has_begun(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    """Send a signal before the first line of a rank. Ranks are started with signals blocked."""
    site = "import os, signal\nif 'RANK' in os.environ: os.kill(os.getpid(), signal.SIGTERM)\n"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(site)
    ran = drive("train", recipe, "--out=run", "--nproc=2", PYTHONPATH=str(tmp_path / "site"))
    assert ran.code == EXIT_PREEMPTED, ran.stderr
    assert "SIGTERM came before training began" in ran.stderr
    assert not (tmp_path / "run").exists()


ONE = "import os, signal\nif os.environ.get('RANK') == '1': os.kill(os.getpid(), signal.SIGTERM)\n"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["its first line", "its recipe"])
def test_to_one_rank_before_ranks_have_met(
    drive: Drive, recipe: Path, tmp_path: Path, where: str
) -> None:
    """Require that all ranks end, as after one signal to the launcher."""
    (tmp_path / "site").mkdir()
    if where == "its first line":
        (tmp_path / "site" / "sitecustomize.py").write_text(ONE)
    else:
        recipe.write_text(ONE + recipe.read_text())
    ran = drive("train", recipe, "--out=run", "--nproc=2", PYTHONPATH=str(tmp_path / "site"))
    assert ran.code == EXIT_PREEMPTED, ran.stderr
    assert "rank 1" in ran.stderr and "SIGTERM came before training began" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "run").exists()


DEAD = """
import os, signal, time
if os.environ.get("RANK") == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if "RANK" in os.environ:
    time.sleep(60)
"""


def test_a_rank_that_is_killed_before_ranks_have_met(
    drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    """Require that the death is reported, and not how the launcher ends the others."""
    recipe.write_text(DEAD + recipe.read_text())
    ran = drive("train", recipe, "--out=run", "--nproc=2")
    assert ran.code == 128 + signal.SIGKILL
    assert ran.stderr == "error (rank 1): it ended with signal 9 and left no message\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("DRIVETRAIN_SIGNALS", "6"))))
def test_at_any_time(recipe: Path, tmp_path: Path, seed: int) -> None:
    """Send a signal to the command or all its processes, from the first moment at which Python can
    handle it.
    """
    chance = random.Random(f"signals {seed}")
    ranks, workers = chance.choice([1, 2]), chance.choice([0, 2])
    number, whole = chance.choice(SIGNALS), chance.random() < 0.5
    words = ["--out=run", f"--nproc={ranks}", f"--set=data.workers={workers}", "--steps=100000"]
    words += ["--backend=ddp"] if ranks > 1 else []
    code = "import sys; open('began', 'w').close(); from drivetrain.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", f"import signal; {CLEARLY}; {code}", "train", str(recipe), *words],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "began").exists():
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 15 * ranks))
    pids = [process.pid]
    if whole:
        pids += children(process.pid)
        pids += [pid for child in pids[1:] for pid in children(child)]
    for pid in reversed(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    try:
        _, printed = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == EXIT_PREEMPTED, (ranks, workers, name(number), whole, printed)
    assert "Traceback" not in printed
    saved = "before training began" not in printed
    assert any((tmp_path / "run" / "checkpoints").glob("checkpoint-*/manifest.json")) == saved


CLEARLY = (
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])"
)
"""The start of the interpreter, before any code of drivetrain, is not part of the test."""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all(drive: Drive, recipe: Path, rank: int) -> None:
    """Let a rank send the signal to itself. The first rank to end must not end the others early."""
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


@pytest.mark.slow
def test_a_second_one_to_the_launcher_stops_all(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    slow = "open(f'pid-{os.getpid()}', 'w').close() or time.sleep(6000) or "
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

    ran = drive("train", recipe, "--out=run", "--nproc=2", meanwhile=twice)
    assert ran.code not in (0, EXIT_PREEMPTED), json.dumps(ran.stderr)
    none_lives_on([int(left.name.removeprefix("pid-")) for left in tmp_path.glob("pid-*")])


NAP = """
import os, time
def nap(index):
    if os.path.exists("asleep") and index % 2 == 0:
        open(f"pid-{os.getpid()}-worker", "w").close()
        time.sleep(600)
"""


@pytest.mark.slow
def test_a_launcher_that_is_killed_takes_its_ranks_along(
    drive: Drive, recipe: Path, tmp_path: Path
) -> None:
    """Require the end of ranks and their data workers, one of which sleeps in the data set. A
    restart trains at once.
    """
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
    """Require the end of processes that are killed when their launcher ends; the operating system
    takes a moment for it.
    """
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if Path(f"/proc/{pid}/stat").exists()]:
        assert time.monotonic() < deadline, f"{alive} live on"
        time.sleep(0.1)


def children(process: int | None) -> list[int]:
    found: list[int] = []
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        found += map(int, listed.read_text().split())
    return found

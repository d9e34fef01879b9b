"""Two runs in one folder: the second is refused, and the message names the first. The lock of a
dead run is no obstacle.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from torch import Tensor, nn

from drivetrain.checkpoint import checkpoints_of, list_checkpoints, storage_of
from drivetrain.kernel.errors import OutputError
from drivetrain.kernel.events import Logged, Saved, StepEnded, Warned
from drivetrain.kernel.paths import Place, Url
from drivetrain.trainer import run_lock
from drivetrain.trainer.fit import fit
from drivetrain.trainer.run_lock import LOCK, Holder, RunLock

from .compat_runs import train_with_compat
from .runs import FORKSERVER, SETTINGS, Run, loss, recipe, start

SHORT = replace(SETTINGS, steps=4, log_every=1)


class Alone:
    """Stand-in for a session, with the parts that a lock needs."""

    class world:
        rank = 0

    def exchange(self, value: Any) -> list[Any]:
        return [json.loads(json.dumps(value))]


def take(folder: Place, reported: list[str] | None = None, me: Holder | None = None) -> RunLock:
    taken = RunLock(folder)
    taken._me = me or taken._me
    taken.take(Alone(), (reported if reported is not None else []).append)  # type: ignore[arg-type]
    return taken


@pytest.fixture
def living() -> Iterator[Holder]:
    """Yield a lock holder: another living process of this machine."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield replace(
            Holder.of_this_process(),
            process=process.pid,
            started=run_lock._started(process.pid),
            since="noon",
        )
        process.kill()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Holder:
    """A process of another machine, with times that a test can wait for."""
    monkeypatch.setattr(run_lock, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(run_lock, "_LOOK_SECONDS", 0.05)
    return replace(Holder.of_this_process(), host="elsewhere", machine="another", since="noon")


def put(folder: Path, holder: Holder) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / LOCK).write_text(json.dumps(asdict(holder)))
    return folder


# --- whole runs -----------------------------------------------------------------------------------


def waits(what: Any, out: Path, environment: dict[str, str]) -> None:
    """Start a run that does three steps, and then waits."""

    def slow(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if len(list(checkpoints_of(out).glob("checkpoint-*"))) == 3:
            (out.parent / "waits").touch()
            time.sleep(600)
        return loss(module, batch)

    keeps = replace(SHORT, checkpoint=replace(SHORT.checkpoint, keep_last=100))
    fit(replace(recipe(), loss=slow), keeps, backend="cpu", out=out, resume="auto")


def listed(out: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in out.rglob("*") if path.name != LOCK}


@pytest.mark.slow
def test_the_second_is_refused_and_a_killed_one_is_followed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    (first,) = start(None, out, 1, waits)
    while not (tmp_path / "waits").exists():
        assert first.is_alive()
        time.sleep(0.05)
    before = listed(out)
    with pytest.raises(OutputError, match=f"another run writes to .*: process {first.pid} on "):
        fit(recipe(), SHORT, backend="cpu", out=out, resume="auto")
    os.kill(first.pid or 0, signal.SIGSTOP)  # it lives as long as it may continue
    with pytest.raises(OutputError, match=f"process {first.pid} on "):
        fit(recipe(), SHORT, backend="cpu", out=out, resume="auto")
    assert listed(out) == before
    first.kill()
    first.join()
    events: list[Any] = []
    monkeypatch.setattr(run_lock, "_LOOK_SECONDS", 6000)  # it does not wait
    fit(recipe(), SHORT, backend="cpu", out=out, resume="auto", observers=[events.append])
    assert [event.step for event in events if isinstance(event, Logged)] == [4]
    assert not list(out.glob(f"*{LOCK}*"))


def test_who_was_taken_for_dead_ends_and_saves_nothing_more(tmp_path: Path) -> None:
    """Let another process take over the folder of a run that was taken for dead, as after a
    machine's sleep.
    """
    events: list[Any] = []

    def usurp(event: Any) -> None:
        events.append(event)
        if isinstance(event, StepEnded) and event.step == 2:
            put(tmp_path, replace(Holder.of_this_process(), host="elsewhere", machine="another"))

    with pytest.raises(OutputError, match=r"was taken over by another run \(process .* elsewhere"):
        fit(recipe(), SHORT, backend="cpu", out=tmp_path, observers=[usurp])
    failed = [event for event in events if isinstance(event, Saved) and event.error]
    assert [event.step for event in failed] == [2]
    assert [found.step for found in list_checkpoints(tmp_path / "checkpoints").complete] == [1]
    assert (tmp_path / LOCK).exists()  # the other's


def test_without_room_for_a_lock_a_run_continues_and_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", full)
    events: list[Any] = []
    fit(recipe(), SHORT, backend="cpu", out=tmp_path, observers=[events.append])
    reported = [event.message for event in events if isinstance(event, Warned)]
    assert (
        len(reported) == 1
        and "could not be locked against other runs: No space left" in reported[0]
    )


# --- which locks are of living runs ---------------------------------------------------------------


def test_a_living_process_is_named(tmp_path: Path, living: Holder) -> None:
    put(tmp_path, living)
    with pytest.raises(OutputError, match=f"process {living.process} on .*, since noon. Wait for"):
        take(tmp_path)
    assert Holder.read((tmp_path / LOCK).read_bytes()) == living


def test_compat_names_the_process_that_trains_into_its_folder(
    tmp_path: Path, living: Holder
) -> None:
    put(tmp_path, living)
    with pytest.raises(OutputError, match=f"process {living.process}"):
        train_with_compat(Run(), tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == [LOCK], "nothing was written"


@pytest.mark.parametrize("started", ["1", ""])
def test_another_process_of_that_number_is_another(
    tmp_path: Path, living: Holder, started: str
) -> None:
    take(put(tmp_path, replace(living, started=started))).release()
    assert not list(tmp_path.iterdir())


def test_another_machine_that_is_silent_is_waited_for(tmp_path: Path, elsewhere: Holder) -> None:
    reported: list[str] = []
    began = time.monotonic()
    take(put(tmp_path, elsewhere), reported).release()
    assert time.monotonic() - began >= 1.0
    assert (
        len(reported) == 1
        and "on elsewhere, since noon, which this machine cannot check" in reported[0]
    )


@pytest.mark.parametrize("raw", ["", "[]", '{"host": 3}', "\x00\x1b[2J", "[" * 20_000])
def test_what_is_not_understood_is_waited_for(tmp_path: Path, elsewhere: Holder, raw: str) -> None:
    (tmp_path / LOCK).write_text(raw)
    reported: list[str] = []
    take(tmp_path, reported).release()
    assert len(reported) == 1 and "a process that is not known" in reported[0]


def test_another_machine_that_lives_is_named(tmp_path: Path, elsewhere: Holder) -> None:
    path = put(tmp_path, elsewhere) / LOCK
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.2):
            os.utime(path)

    beating = threading.Thread(target=beat)
    beating.start()
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(beating.join)
        stack.callback(over.set)
        with pytest.raises(OutputError, match="on elsewhere, since noon"):
            take(tmp_path)


def test_the_same_job_started_again_resumes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun starts the ranks of another machine where the first one's died."""
    there = replace(Holder.of_this_process(), host="elsewhere", machine="another", job="run 7")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run 7")
    monkeypatch.setattr(run_lock, "_LOOK_SECONDS", 6000)  # it does not wait
    take(put(tmp_path, there)).release()


def test_runs_of_one_process_know_of_each_other(tmp_path: Path) -> None:
    first, second = take(tmp_path), take(tmp_path)
    first.release()
    assert (tmp_path / LOCK).exists()
    second.release()
    second.release()
    assert not (tmp_path / LOCK).exists()


def test_a_beat_renews_what_is_there_and_puts_back_what_is_gone(tmp_path: Path) -> None:
    mine = take(tmp_path)
    os.utime(tmp_path / LOCK, (0, 0))
    mine.check_now()
    assert (tmp_path / LOCK).stat().st_mtime > 0
    (tmp_path / LOCK).unlink()
    mine.check_now()
    assert (tmp_path / LOCK).exists()
    mine.release()


@pytest.mark.parametrize(
    "links", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["links", "no links"]
)
def test_of_several_at_once_one_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """Let several processes take over the lock of a dead one at once."""
    put(tmp_path, replace(Holder.of_this_process(), started="1"))
    ranks = [FORKSERVER.Process(target=contend, args=(tmp_path, links)) for _ in range(6)]
    for rank in ranks:
        rank.start()
    (tmp_path / "go").touch()
    for rank in ranks:
        rank.join(60)
    assert sorted(rank.exitcode or 0 for rank in ranks) == [0, 2, 2, 2, 2, 2]
    assert not list(tmp_path.glob(f"*{LOCK}*"))


def contend(folder: Path, links: bool) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        os.link = no_links
    while not (folder / "go").exists():
        time.sleep(0.001)
    try:
        mine = take(folder)
    except OutputError:
        (folder / f"refused-{os.getpid()}").touch()
        sys.exit(2)
    while len(list(folder.glob("refused-*"))) < 5:
        time.sleep(0.05)
    mine.release()


# --- at a URL -------------------------------------------------------------------------------------


@pytest.mark.parametrize("conditional", [True, False], ids=["", "no conditions"])
def test_at_a_url(
    living: Holder, elsewhere: Holder, monkeypatch: pytest.MonkeyPatch, conditional: bool
) -> None:
    url, files = Url(f"memory://locks/{conditional}"), fsspec.filesystem("memory")
    if not conditional:

        def refuses(*_: Any, **named: Any) -> None:
            raise NotImplementedError(str(named))

        monkeypatch.setattr(type(files), "pipe_file", refuses)

    def put_there(holder: Holder) -> None:
        storage_of(url).replace(url / LOCK, json.dumps(asdict(holder)).encode())

    put_there(living)
    with pytest.raises(OutputError, match=f"process {living.process} on "):
        take(url)
    put_there(replace(living, started="1"))
    mine = take(url)
    mine.check_now()
    assert json.loads(files.cat(f"locks/{conditional}/{LOCK}"))["beat"] == 1
    mine.release()
    put_there(elsewhere)
    take(url).release()
    assert not files.exists(f"locks/{conditional}/{LOCK}")
    mine = take(url)
    put_there(living)
    with pytest.raises(OutputError, match=r"was taken over by another run \(process"):
        mine.check_now()
    mine.release()
    assert files.exists(f"locks/{conditional}/{LOCK}")

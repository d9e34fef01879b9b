"""Notices of preemption: a file, a command or a further signal saves the run and stops it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from drivetrain import Settings
from drivetrain.checkpoint import list_checkpoints
from drivetrain.kernel.errors import EXIT_PREEMPTED, SettingError
from drivetrain.kernel.events import Request, StepEnded
from drivetrain.trainer import preemption_notice
from drivetrain.trainer.fit import fit
from drivetrain.trainer.setting_values import override

from .runs import SETTINGS, everything, loss, recipe, start

STEP, STEPS = 3, 100_000
"""The step at which a notice is given, and more steps than a run makes until it comes."""
LONG = replace(
    SETTINGS,
    steps=STEPS,
    log_every=1000,
    evaluate=replace(SETTINGS.evaluate, every=None, at_end=False),
    checkpoint=replace(SETTINGS.checkpoint, every=None),
)


class Gives:
    """An observer that calls `give` at a step. Later steps are slow, until the notice is
    received."""

    def __init__(self, give: Callable[[], object], stop_at: int | None = None) -> None:
        self.give, self.stop_at = give, stop_at

    def __call__(self, event: Any) -> Request | None:
        if not isinstance(event, StepEnded):
            return None
        if self.stop_at is not None:
            return Request.STOP if event.step == self.stop_at else None
        if event.step == STEP:
            self.give()
        elif event.step > STEP:
            time.sleep(0.02)
        return None


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let commands run often. Require that no thread or handler is left by a run."""
    monkeypatch.setattr(preemption_notice, "_COMMAND_SECONDS", 0.1)
    yield
    assert [each.name for each in threading.enumerate() if each.name == "drivetrain-notice"] == []
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def trained(notice: str, give: Callable[[], object], out: Path | None = None) -> Any:
    settings = replace(LONG, preemption_notice=(notice,))
    return fit(recipe(), settings, backend="cpu", out=out, observers=[Gives(give)])


@dataclass(frozen=True)
class Case:
    """A run whose notice is the file `notice` beside its folder."""

    backend: str
    num_ranks: int
    notices: tuple[str, ...]
    signalled: int | None = None
    """The rank that receives SIGUSR2 instead."""
    stop_at: int | None = None
    """The step at which observers end the run, if no notice is given."""


def noticed(case: Case, out: Path, environment: dict[str, str]) -> None:
    """Train on one rank, and exit as a command does."""
    os.environ.update(environment)
    preemption_notice._COMMAND_SECONDS = 0.1
    rank = int(environment.get("RANK", "0"))
    handle = os.open(out.parent / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 2)
    sys.stderr = os.fdopen(2, "w")

    def give() -> None:
        if case.signalled == rank:
            os.kill(os.getpid(), signal.SIGUSR2)
        elif case.signalled is None and rank == 0:
            (out.parent / "notice").touch()

    result = fit(
        recipe(),
        replace(LONG, preemption_notice=case.notices),
        backend=case.backend,
        out=out,
        resume="auto",
        observers=[Gives(give, case.stop_at)],
    )
    sys.exit(EXIT_PREEMPTED if result.reason == "preempted" else 0)


def run(case: Case, out: Path) -> list[int | None]:
    ranks = start(case, out, case.num_ranks, noticed)
    for rank in ranks:
        rank.join(240)
    return [rank.exitcode for rank in ranks]


@pytest.mark.few(1)
@pytest.mark.parametrize(("backend", "num_ranks"), [("cpu", 1), ("ddp", 2)])
def test_a_file_loses_nothing(tmp_path: Path, backend: str, num_ranks: int) -> None:
    """Require a checkpoint of the last step, from which the run continues bit by bit."""
    cut, whole, notice = tmp_path / "cut", tmp_path / "whole", tmp_path / "notice"
    case = Case(backend, num_ranks, (f"file:{notice}",))
    assert run(case, cut) == [EXIT_PREEMPTED] * num_ranks
    saved = [each.step for each in list_checkpoints(cut / "checkpoints").complete]
    assert len(saved) == 1 and saved[0] >= STEP
    line = f"file:{notice}: saving after this step; remove the file before you start again\n"
    assert (tmp_path / "stderr-0").read_text().count(line) == 1
    notice.unlink()
    rest = replace(case, stop_at=saved[0] + 2)
    assert run(rest, cut) == run(rest, whole) == [0] * num_ranks
    found, expected = (list_checkpoints(out / "checkpoints").complete[-1] for out in (cut, whole))
    assert found.step == expected.step > saved[0]
    tensors = everything(expected.folder)
    for name, tensor in everything(found.folder).items():
        assert tensor.equal(tensors.pop(name)), name
    assert not tensors


def test_one_rank_of_a_machine_runs_the_command(tmp_path: Path) -> None:
    runs, notice = tmp_path / "runs", tmp_path / "notice"
    case = Case("ddp", 2, (f"command:echo rank $RANK >> {runs}; test -e {notice}",))
    assert run(case, tmp_path / "run") == [EXIT_PREEMPTED] * 2
    assert set(runs.read_text().splitlines()) == {"rank 0"}
    assert "command:echo rank $RANK" in (tmp_path / "stderr-0").read_text()
    assert "command:" not in (tmp_path / "stderr-1").read_text()


def test_a_signal_to_one_rank_stops_all(tmp_path: Path) -> None:
    case = Case("ddp", 2, ("signal:SIGUSR2",), signalled=1)
    assert run(case, tmp_path / "run") == [EXIT_PREEMPTED] * 2


@pytest.mark.parametrize("text", ["signal:SIGUSR2", "signal:usr2", f"signal:{signal.SIGUSR2:d}"])
def test_a_signal_by_name_or_number(capfd: pytest.CaptureFixture[str], text: str) -> None:
    result = trained(text, lambda: [os.kill(os.getpid(), signal.SIGUSR2) for _ in range(2)])
    assert (result.reason, result.step) == ("preempted", STEP)
    assert capfd.readouterr().err.count(f"{text}: stopping after this step\n") == 1


def test_a_signal_that_the_program_handles_is_refused() -> None:
    signal.signal(signal.SIGUSR2, print)
    try:
        with pytest.raises(SettingError, match=r"SIGUSR2', and the program handles .*print"):
            trained("signal:SIGUSR2", int)
        assert signal.getsignal(signal.SIGUSR2) is print
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_a_signal_outside_the_main_thread_is_refused() -> None:
    errors: list[BaseException] = []

    def train() -> None:
        try:
            trained("signal:SIGUSR2", int)
        except SettingError as error:
            errors.append(error)

    thread = threading.Thread(target=train, name="elsewhere")
    thread.start()
    thread.join()
    assert "the thread 'elsewhere'" in str(errors[0])


def test_the_first_of_several(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    notices = ("command:exit 3", f"file:{tmp_path / 'one'}", f"file:{tmp_path / 'two'}")
    settings = replace(LONG, preemption_notice=notices)
    gives = Gives((tmp_path / "two").touch)
    result = fit(recipe(), settings, backend="cpu", out=tmp_path / "run", observers=[gives])
    assert result.reason == "preempted"
    assert result.checkpoint is not None and result.checkpoint.name.endswith(f"{result.step:06d}")
    printed = capfd.readouterr().err
    assert printed.startswith(f"file:{tmp_path / 'two'}: saving after this step")
    assert printed.count("\n") == 1


def test_a_file_that_exists_already_is_refused(tmp_path: Path) -> None:
    notice = tmp_path / "it's there"
    notice.touch()
    with pytest.raises(SettingError, match=r"this file exists already: .*remove it \(rm '/"):
        trained(f"file:{notice}", int, out=tmp_path / "run")
    assert not list_checkpoints(tmp_path / "run" / "checkpoints").complete


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("no-such-command-anywhere", r"cannot be run \(exit code 127 of the shell\)"),
        ("sleep 600", r"took more than 0\.3 s, and was killed"),
    ],
)
def test_a_command_that_cannot_run_is_reported_once(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    what: str,
) -> None:
    """Require one warning, and that training goes to its end. The command is tried again."""
    monkeypatch.setattr(preemption_notice, "_LONGEST_SECONDS", 0.3)
    monkeypatch.setattr(preemption_notice, "_LOOK_SECONDS", 0.1)
    runs = tmp_path / "runs"
    notice = f"command:echo >> {runs}; {command}"

    def lossy(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        while not runs.exists() or runs.read_text().count("\n") < 3:
            time.sleep(0.01)
        return loss(module, batch)

    settings = replace(LONG, steps=STEP, preemption_notice=(notice,))
    result = fit(replace(recipe(), loss=lossy), settings, backend="cpu")
    assert (result.reason, result.step) == ("finished", STEP)
    printed = capfd.readouterr().err
    assert printed.startswith(f"warning: the preemption notice {notice!r} ")
    assert printed.count("\n") == 1 and re.search(what, printed)


def alive(group: int) -> list[str]:
    """Return the processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended since it was listed
            state, _, of_group = stat.read_text().rpartition(")")[2].split()[:3]
            found += [stat.parent.name] if int(of_group) == group and state != "Z" else []
    return found


def test_a_run_that_raises_leaves_no_command(tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def lossy(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        while not begun.exists() or not begun.read_text().endswith("\n"):
            time.sleep(0.01)
        raise ArithmeticError

    settings = replace(LONG, preemption_notice=(f"command:echo $$ > {begun}; sleep 600; true",))
    files = []
    for _ in range(2):  # the first imports, and opens what stays open
        files.append(len(os.listdir("/proc/self/fd")))
        begun.unlink(missing_ok=True)
        with pytest.raises(ArithmeticError):
            fit(replace(recipe(), loss=lossy), settings, backend="cpu")
        with pytest.raises(ProcessLookupError):
            os.kill(int(begun.read_text()), 0)
        deadline = time.monotonic() + 30  # its `sleep` is killed, and ends a little later
        while alive(int(begun.read_text())) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not alive(int(begun.read_text()))
    assert len(os.listdir("/proc/self/fd")) <= files[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "/tmp/notice",
            r"'/tmp/notice', which is not a notice; write file:/path .* command:",
        ),
        ("file:", "which is not a notice"),
        ("command: ", "which is not a notice"),
        ("flag:x", "'flag:x', which is not a notice"),
        ("file:a\0b", "which is not a notice"),
        ("signal:SIGNONE", "no signal 'SIGNONE'; write the name or the number of one"),
        ("signal:0", "no signal '0'"),
        ("signal:" + "9" * 5000, "no signal '99"),
        ("signal:SIGKILL", "cannot be a notice: .*Take another one"),
        ("signal:17", "cannot be a notice"),
        ("signal:SIGTERM", "saves and stops on this signal already"),
    ],
)
def test_what_is_not_a_notice_is_refused(text: str, message: str) -> None:
    for given in ((text,), [text]):
        with pytest.raises(SettingError, match=message):
            Settings(preemption_notice=given)  # type: ignore[arg-type]


def test_a_text_alone_is_refused_in_python() -> None:
    with pytest.raises(SettingError, match=r"give a tuple of notices: \('file:/a',\)"):
        Settings(preemption_notice="file:/a")  # type: ignore[arg-type]
    assert override(Settings(), {"preemption_notice": "file:/a,signal:USR2"}).preemption_notice == (
        "file:/a",
        "signal:USR2",
    )

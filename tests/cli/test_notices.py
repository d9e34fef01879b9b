"""Notices of preemption that a command is given: `--preemption-notice`."""

from __future__ import annotations

import json
import os
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from command_line import Drive, when_it_trains

from drivetrain.kernel.errors import EXIT_PREEMPTED

LONG = ("--out=run", "--steps=1000000", "--json")


def test_a_file_stops_it_until_it_is_removed(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    words = ("--preemption-notice=command:exit 1,2", f"--preemption-notice=file:{notice}")
    given = when_it_trains(tmp_path, lambda process: notice.touch())
    ran = drive("train", recipe, *LONG, *words, meanwhile=given)
    assert ran.code == EXIT_PREEMPTED, ran.stderr
    ended = ran.records()[-1]
    assert ended["reason"] == "preempted"
    assert ended["checkpoint"].endswith(f"{ended['step']:06d}")
    line = f"file:{notice}: saving after this step; remove the file before you start again"
    assert ran.stderr.count(line) == 1
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["given"]["preemption_notice"] == ["command:exit 1,2", f"file:{notice}"]

    again = drive("train", "--resume", "run", "--json")
    assert again.code == 2
    assert "this file exists already: the run would stop without training. If" in again.stderr
    assert f"remove it (rm {notice})" in again.stderr
    notice.unlink()
    steps = ended["step"] + 2
    resumed = drive("train", "--resume", "run", f"--steps={steps}", "--json")
    assert resumed.code == 0, resumed.stderr
    assert resumed.records()[-1]["step"] == steps


def test_a_signal_to_the_launcher_is_passed_on(drive: Drive, recipe: Path, tmp_path: Path) -> None:
    def send(process: BaseProcess) -> None:
        os.kill(process.pid or 0, signal.SIGUSR2)

    words = ("--backend=ddp", "--nproc=2", "--set=preemption_notice=signal:USR2")
    ran = drive("train", recipe, *LONG, *words, meanwhile=when_it_trains(tmp_path, send))
    assert ran.code == EXIT_PREEMPTED, ran.stderr
    assert ran.records()[-1]["reason"] == "preempted"
    assert ran.stderr.count("saving after this step") == 1


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_malformed_notice_starts_nothing(
    drive: Drive, recipe: Path, tmp_path: Path, nproc: int
) -> None:
    words = (f"--nproc={nproc}", "--backend=ddp", "--preemption-notice=/tmp/a")
    ran = drive("train", recipe, *LONG, *words)
    assert ran.code == 2
    assert "preemption_notice has '/tmp/a', which is not a notice; write file:/path" in ran.stderr
    assert not (tmp_path / "run").exists()

"""Notices of preemption in compat's Trainer: `preemption_notice` saves and stops."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from side_by_side import arguments, assert_same_weights, classifier, samples

from drivetrain import compat
from drivetrain.compat import TrainingArguments
from drivetrain.kernel.errors import SettingError

STEPS = 5000
"""More steps than a run makes until the notice is received."""


class Gives(compat.TrainerCallback):
    """Gives the notice in the second update; later steps are slow. Ends the run at a step."""

    def __init__(self, notice: Path | None, stop_at: int = STEPS) -> None:
        self.notice, self.stop_at = notice, stop_at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.notice is not None and state.global_step >= 2:
            self.notice.touch()
            time.sleep(0.02)
        control.should_save = control.should_training_stop = state.global_step == self.stop_at


def trainer(folder: Path, callback: Any, **changes: Any) -> Any:
    args = arguments(compat, folder, max_steps=STEPS, logging_steps=STEPS, **changes)
    return compat.Trainer(classifier(0.5), args, train_dataset=samples(), callbacks=[callback])


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_a_file_loses_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    notice, cut = tmp_path / "notice", tmp_path / "cut"
    given = {"preemption_notice": ["command:exit 3", f"file:{notice}"]}
    made = trainer(cut, Gives(notice), **given)
    made.train()
    step = made.state.global_step
    assert 2 <= step < STEPS and saved(cut) == [f"checkpoint-{step}"]
    line = f"file:{notice}: saving after this step; remove the file before you start again\n"
    assert capfd.readouterr().err.count(line) == 1
    assert "drivetrain-notice" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(SettingError, match="this file exists already"):
        made.train(resume_from_checkpoint=True)
    notice.unlink()
    resumed = trainer(cut, Gives(None, step + 2), **given)
    resumed.train(resume_from_checkpoint=True)
    whole = trainer(tmp_path / "whole", Gives(None, step + 2))
    whole.train()
    assert resumed.state.global_step == whole.state.global_step == step + 2
    assert_same_weights(resumed.model, whole.model)


class Signals(compat.TrainerCallback):
    """Sends the signal to its own process in the second update."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGUSR2)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_signal(tmp_path: Path, workers: int) -> None:
    given = {"preemption_notice": "signal:SIGUSR2", "dataloader_num_workers": workers}
    made = trainer(tmp_path, Signals(), **given)
    assert made.args.preemption_notice == ["signal:SIGUSR2"]
    made.train()
    assert made.state.global_step == 2 and saved(tmp_path) == ["checkpoint-2"]
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


class OwnLoop(compat.Trainer):
    """A Trainer whose loop is its own."""

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError


def test_a_loop_of_ones_own_cannot_receive_it(tmp_path: Path) -> None:
    args = arguments(compat, tmp_path, preemption_notice=["signal:SIGUSR2"])
    with pytest.raises(ValueError, match=r"refuses preemption_notice=.* beside OwnLoop"):
        OwnLoop(classifier(), args, train_dataset=samples())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["/tmp/a"], "has '/tmp/a', which is not a notice; write file:/path"),
        ("signal:SIGTERM", "each run saves and stops on this signal already"),
        (3, "preemption_notice is 3; it must be a list of texts"),
    ],
)
def test_a_malformed_notice_is_refused(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingArguments(str(tmp_path), preemption_notice=given)

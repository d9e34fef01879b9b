"""SIGTERM saves a checkpoint if the arguments say so; otherwise its handler is left alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import transformers
from side_by_side import arguments, assert_same_weights, classifier, samples
from transformers.trainer_jit_checkpoint import CheckpointManager
from transformers.trainer_jit_checkpoint import JITCheckpointCallback as theirs

from drivetrain import compat


class Terminates(compat.TrainerCallback):
    """Sends SIGTERM to its own process, in the second update."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def trained(folder: Path, *callbacks: Any, resume: bool = False, **changes: Any) -> Any:
    args = arguments(compat, folder, max_steps=5, **changes)
    trainer = compat.Trainer(classifier(0.5), args, train_dataset=samples(), callbacks=[*callbacks])
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


@pytest.mark.row("K35")
def test_a_checkpoint_in_time(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    stopped = trained(tmp_path / "stopped", Terminates(), enable_jit_checkpoint=True)
    assert stopped.state.global_step == 2
    assert [path.name for path in (tmp_path / "stopped").glob("checkpoint-*")] == ["checkpoint-2"]
    assert signal.getsignal(signal.SIGTERM) == before
    resumed = trained(tmp_path / "stopped", resume=True, enable_jit_checkpoint=True)
    whole = trained(tmp_path / "whole")
    assert resumed.state.global_step == 5
    assert_same_weights(resumed.model, whole.model)


class TerminatesAll(Terminates):
    """Sends the signal to the data workers, too, as a job queue does."""

    def __init__(self) -> None:
        self.others = {process.pid for process in multiprocessing.active_children()}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_begin(args, state, control, **kwargs)
        if state.global_step == 1:
            # by another process: a signal of its parent's would be the order to end
            active = multiprocessing.active_children()
            workers = [process for process in active if process.pid not in self.others]
            subprocess.run(["kill", *(str(worker.pid) for worker in workers)], check=True)
            time.sleep(0.5)


def test_its_workers_leave_it_to_the_trainer(tmp_path: Path) -> None:
    changes = {"enable_jit_checkpoint": True, "dataloader_num_workers": 1}
    trainer = trained(tmp_path, TerminatesAll(), **changes)
    assert trainer.state.global_step == 2
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.row("B2", "K35")
def test_its_callback_stands_where_theirs_does(tmp_path: Path) -> None:
    """Require the callback before the user's. Removing it removes its effect."""
    before = signal.getsignal(signal.SIGTERM)
    names = []
    for library in (transformers, compat):
        args = arguments(library, tmp_path, enable_jit_checkpoint=True)
        mine = type("Mine", (library.TrainerCallback,), {})
        trainer = library.Trainer(classifier(0.5), args, train_dataset=samples(), callbacks=[mine])
        names.append(trainer.callback_handler.callback_list)
        found = [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, theirs)]
        assert [cb.trainer for cb in found] == [trainer]
        assert isinstance(found[0].jit_manager, CheckpointManager)
        signal.signal(signal.SIGTERM, before)  # theirs waits for it from here on
    assert names[0] == names[1]
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    try:
        trainer.add_callback(Terminates())
        trainer.remove_callback(theirs)
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen and trainer.state.global_step == trainer.state.max_steps


@pytest.mark.row("K35")
def test_a_signal_that_nobody_asked_for(tmp_path: Path) -> None:
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("mine"))
    try:
        trainer = trained(tmp_path, Terminates())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == ["mine"] and trainer.state.global_step == 5
    assert not list(tmp_path.glob("checkpoint-*"))

"""`auto_find_batch_size` when memory runs out in the middle of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import Classifier, arguments, assert_same_history, assert_same_weights, samples
from torch import Tensor

from drivetrain import compat


class Cramped(Classifier):
    """A model that has memory for batches of two, once its memory has shrunk."""

    room = 4

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if self.training and len(x) > self.room:
            raise torch.OutOfMemoryError(f"CUDA out of memory. {len(x)} samples are too many")
        return super().forward(x, labels)


class Shrink(compat.TrainerCallback):  # type: ignore[misc]
    """Leaves memory for `room` samples after the given step."""

    def __init__(self, step: int, room: int = 2) -> None:
        self.step, self.room = step, room

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            kwargs["model"].room = self.room


def trainer(folder: Path, shrink_at: int = 0, num_samples: int = 16, **changes: Any) -> Any:
    """Return a Trainer with batches of four, for two epochs of four updates."""
    torch.manual_seed(1)
    given = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "logging_steps": 2, **changes}
    args = arguments(compat, folder, auto_find_batch_size=True, **given)
    data = samples(num_samples)
    return compat.Trainer(
        Cramped(), args, train_dataset=data, eval_dataset=data[:3], callbacks=[Shrink(shrink_at)]
    )


SMALL: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
WATCHED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3}


def assert_same(mine: Any, other: Any) -> None:
    """Require the same curve, summary of the run, and weights."""
    assert_same_history(mine.state.log_history, other.state.log_history)
    assert_same_weights(mine.model, other.model)
    assert mine.state.global_step == other.state.global_step == 8


@pytest.mark.row(
    "L17", status="differs", note="continues, with as many samples an update; theirs starts over"
)
@pytest.mark.parametrize("shrink_at", [1, 2, 3, 5])
def test_the_curve_is_that_of_a_small_batch_from_the_start(tmp_path: Path, shrink_at: int) -> None:
    small = trainer(tmp_path / "small", **SMALL, **WATCHED)
    small.train()
    found = trainer(tmp_path / "found", shrink_at, **WATCHED)
    found.train()
    assert found.state.train_batch_size == 2
    assert_same(found, small)
    assert found.args.gradient_accumulation_steps == 1


@pytest.mark.row(
    "L17", status="differs", note="continues, with as many samples an update; theirs starts over"
)
@pytest.mark.parametrize("shrink_at", [2, 3, 4])
def test_an_epoch_may_end_in_a_shorter_update(tmp_path: Path, shrink_at: int) -> None:
    small = trainer(tmp_path / "small", num_samples=14, logging_steps=1, **SMALL)
    small.train()
    found = trainer(tmp_path / "found", shrink_at, num_samples=14, logging_steps=1)
    found.train()
    losses = [[log.get("loss") for log in each.state.log_history] for each in (found, small)]
    assert losses[0][:-1] == pytest.approx(losses[1][:-1]) and len(losses[0]) == 9
    assert_same_weights(found.model, small.model)


@pytest.mark.row(
    "L17", status="differs", note="continues, with as many samples an update; theirs starts over"
)
def test_a_resumed_run_that_runs_out_continues_from_where_it_was(tmp_path: Path) -> None:
    small = trainer(tmp_path / "small", **SMALL)
    small.train()
    saved = {"save_strategy": "steps", "save_steps": 2}
    trainer(tmp_path / "stopped", **saved).train()
    for resumed in (trainer(tmp_path / "again", 5), trainer(tmp_path / "again", 2)):
        resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-2"))
        assert_same_history(resumed.state.log_history[:-1], small.state.log_history[:-1])
        assert_same_weights(resumed.model, small.model)


@pytest.mark.row("K15")
def test_what_was_found_keeps_the_samples_of_an_update(tmp_path: Path) -> None:
    small = trainer(tmp_path / "small", **SMALL)
    small.train()
    found = trainer(tmp_path / "found", 1, save_strategy="steps", save_steps=2)
    found.train()
    resumed = trainer(tmp_path / "again")
    resumed.train(resume_from_checkpoint=str(tmp_path / "found" / "checkpoint-4"))
    assert resumed.state.train_batch_size == 2
    assert_same_weights(resumed.model, small.model)
    for each in (small, found):
        each.train()  # once more, from these weights
    assert_same(found, small)


def test_one_sample_that_does_not_fit_is_said(tmp_path: Path) -> None:
    made = trainer(tmp_path, per_device_train_batch_size=2)
    made.model.room = 0
    with pytest.raises(RuntimeError, match=r"one sample.*gradient_checkpointing"):
        made.train()

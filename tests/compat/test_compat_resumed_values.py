"""A run that is resumed with other hyper-parameters keeps those of the checkpoint, and says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from side_by_side import arguments, classifier, losses, samples

from drivetrain import compat
from drivetrain.compat.checkpoints.resumed_values import differing, with_asked

SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "weight_decay": 0.01}
OTHER = {
    "learning_rate": 0.1,
    "weight_decay": 0.3,
    "adam_beta1": 0.5,
    "adam_beta2": 0.9,
    "adam_epsilon": 1e-3,
}


def trainer(folder: Path, **changes: Any) -> compat.Trainer:
    args = arguments(compat, folder, **{**SAVING, **changes})
    return compat.Trainer(classifier(), args, train_dataset=samples(24))


def resumed(folder: Path, **changes: Any) -> compat.Trainer:
    made = trainer(folder, **changes)
    made.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return made


@pytest.mark.parametrize("layout", ["drivetrain", "hf"])
def test_values_stay_and_are_named(tmp_path: Path, caplog: Any, layout: str) -> None:
    whole = trainer(tmp_path, checkpoint_format=layout)
    whole.train()
    with caplog.at_level(logging.WARNING):
        same = resumed(tmp_path, checkpoint_format=layout)
    assert "asked for" not in caplog.text
    with caplog.at_level(logging.WARNING):
        other = resumed(tmp_path, checkpoint_format=layout, **OTHER)
    assert losses(other) == losses(same) == losses(whole)  # as with transformers
    said = [each for each in caplog.messages if "asked for" in each]
    assert len(said) == 1
    for words in (
        "learning_rate is 0.05 in the checkpoint, and 0.1 was asked for",
        "weight_decay is 0.01 in the checkpoint, and 0.3 was asked for (group 0)",
        "adam_beta1 is 0.9 in the checkpoint, and 0.5 was asked for",
        "adam_beta2 is 0.999 in the checkpoint, and 0.9 was asked for",
        "adam_epsilon is 1e-08 in the checkpoint, and 0.001 was asked for",
        "The checkpoint's values stay",
        "set resume_hyper_parameters='arguments' to take the new ones",
    ):
        assert words in said[0]


@pytest.mark.parametrize("layout", ["drivetrain", "hf"])
def test_new_values_are_taken_if_asked_for(tmp_path: Path, caplog: Any, layout: str) -> None:
    trainer(tmp_path, checkpoint_format=layout).train()
    given = {"checkpoint_format": layout, "resume_hyper_parameters": "arguments", **OTHER}
    with caplog.at_level(logging.WARNING):
        made = resumed(tmp_path, **given)
    group = made.optimizer.param_groups[0]
    assert group["weight_decay"] == 0.3
    assert group["betas"] == (0.5, 0.9)
    assert group["eps"] == 1e-3
    assert group["initial_lr"] == 0.1
    assert made.optimizer.param_groups[1]["weight_decay"] == 0.0
    rates = [log["learning_rate"] for log in made.state.log_history if "learning_rate" in log]
    # the first two are those of the checkpoint's run; the schedule falls from where it was
    assert rates == pytest.approx([0.05, 0.0375, 0.05, 0.025])
    assert "weight_decay is 0.01 in the checkpoint, and 0.3 was asked for" in caplog.text
    assert "The values asked for apply" in caplog.text


def test_what_is_asked_for_is_one_of_two(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="resume_hyper_parameters is 'new'; allowed: 'checkpoint'"):
        arguments(compat, tmp_path, resume_hyper_parameters="new")


def test_values_without_a_schedule_or_of_other_optimizers() -> None:
    then = [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.8}]
    now = [{"lr": 0.2, "momentum": 0.9}, {"lr": 0.2, "momentum": 0.5}]
    assert differing(then, now) == [
        "learning_rate is 0.1 in the checkpoint, and 0.2 was asked for",
        "momentum is 0.8 in the checkpoint, and 0.5 was asked for (group 1)",
    ]
    assert with_asked(then[1], now[1]) == now[1]
    assert differing([{"betas": [0.9, 0.99]}], [{"betas": (0.9, 0.99)}]) == []
    moved, asked = {"lr": 0.05, "initial_lr": 0.1}, {"lr": 0.0, "initial_lr": 0.2}
    assert differing([moved], [{**asked, "initial_lr": 0.1}]) == []
    assert with_asked(moved, asked) == pytest.approx({"lr": 0.1, "initial_lr": 0.2})

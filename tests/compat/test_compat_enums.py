"""Enums, outputs and state: the same names, values and files as in transformers."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import trainer_callback, trainer_utils, training_args
from transformers.debug_utils import DebugOption

from drivetrain import compat
from drivetrain.compat import (
    EarlyStoppingCallback,
    EvalPrediction,
    ExportableState,
    IntervalStrategy,
    OptimizerNames,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

THEIRS = [
    trainer_utils.IntervalStrategy,
    trainer_utils.SaveStrategy,
    trainer_utils.HubStrategy,
    trainer_utils.SchedulerType,
    trainer_utils.HPSearchBackend,
    trainer_utils.FSDPOption,
    training_args.OptimizerNames,
    training_args.ParallelMode,
    DebugOption,
]


@pytest.mark.parametrize("theirs", THEIRS, ids=lambda enum: enum.__name__)
def test_members_equal_those_of_transformers(theirs: type) -> None:
    ours = getattr(compat, theirs.__name__)
    for member in theirs:
        mine = ours[member.name]
        assert mine == member and member == mine and mine == member.value
        assert (mine != member) is False  # strings have an inequality of their own
        assert {member.value: 1}[mine] == 1


def test_members_of_another_name_or_value_differ() -> None:
    assert IntervalStrategy.NO != trainer_utils.IntervalStrategy.STEPS
    assert IntervalStrategy.NO != "steps"
    assert compat.ParallelMode.TPU != training_args.ParallelMode.DISTRIBUTED


def test_an_unknown_word_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="'adamw_torhc' is no OptimizerNames: did you mean 'a"):
        OptimizerNames("adamw_torhc")


@pytest.mark.row("M2")
@pytest.mark.parametrize("extras", [{}, {"inputs": 3}, {"losses": 4}, {"inputs": 3, "losses": 4}])
def test_a_prediction_unpacks_as_theirs(extras: dict[str, int]) -> None:
    ours, theirs = (kind(1, 2, **extras) for kind in (EvalPrediction, transformers.EvalPrediction))
    assert tuple(ours) == tuple(theirs) == tuple(ours[i] for i in range(2 + len(extras)))
    assert (ours.predictions, ours.label_ids) == (1, 2)
    for index in (-1, 2 + len(extras)):
        with pytest.raises(IndexError):
            ours[index]


@pytest.mark.row("B13")
def test_a_state_is_written_and_read_as_theirs(tmp_path: Path) -> None:
    history = [{"loss": 1.5, "step": 1}]
    ours = TrainerState(epoch=0.5, global_step=7, log_history=history, total_flos=3.0)
    ours.save_to_json(tmp_path / "ours.json")
    theirs = trainer_callback.TrainerState.load_from_json(str(tmp_path / "ours.json"))
    theirs.save_to_json(str(tmp_path / "theirs.json"))
    assert (tmp_path / "ours.json").read_text() == (tmp_path / "theirs.json").read_text()
    assert TrainerState.load_from_json(tmp_path / "theirs.json") == ours


def test_a_state_holds_scalars_of_any_make(tmp_path: Path) -> None:
    state = TrainerState(log_history=[{"loss": torch.tensor(1.5), "step": 1}])
    state.save_to_json(tmp_path / "state.json")
    assert TrainerState.load_from_json(tmp_path / "state.json").log_history[0]["loss"] == 1.5
    state.log_history[0]["loss"] = object()
    with pytest.raises(TypeError, match="not object"):
        state.save_to_json(tmp_path / "state.json")


def test_a_state_of_another_version_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"global_step": 3, "of_the_future": 1}
    (tmp_path / "state.json").write_text(json.dumps(fields))
    with caplog.at_level(logging.WARNING):
        state = TrainerState.load_from_json(tmp_path / "state.json")
    assert state.global_step == 3 and state.best_global_step is None
    assert "of_the_future" in caplog.text


@pytest.mark.row("B15")
def test_before_training_the_epoch_is_zero() -> None:
    assert TrainerState().epoch == trainer_callback.TrainerState().epoch == 0


@pytest.mark.parametrize("interval", [0.1, 0.3, 1, 7, None])
def test_intervals_below_one_are_shares(interval: float | None) -> None:
    args = SimpleNamespace(logging_steps=interval, eval_steps=interval, save_steps=interval)
    ours, theirs = TrainerState(), trainer_callback.TrainerState()
    for state in (ours, theirs):
        state.compute_steps(args, 12)
    names = ("logging_steps", "eval_steps", "save_steps")
    assert [getattr(ours, n) for n in names] == [getattr(theirs, n) for n in names]


def test_a_call_of_train_fixes_its_references() -> None:
    trainer = SimpleNamespace(
        hp_name=lambda trial: f"run {trial.number}",
        _trial=SimpleNamespace(number=4),
        is_local_process_zero=lambda: True,
        is_world_process_zero=lambda: False,
    )
    state = TrainerState()
    state.init_training_references(trainer, 9, 3, SimpleNamespace(params={"lr": 1}))
    assert (state.max_steps, state.num_train_epochs) == (9, 3)
    assert (state.trial_name, state.trial_params) == ("run 4", {"lr": 1})
    assert (state.is_local_process_zero, state.is_world_process_zero) == (True, False)
    state.init_training_references(trainer, 9, 3, {"lr": 2})
    assert state.trial_params == {"lr": 2}


@pytest.mark.row("B25")
def test_callbacks_with_state_are_kept_by_class() -> None:
    first, second = EarlyStoppingCallback(2), EarlyStoppingCallback(5, 0.5)
    first.early_stopping_patience_counter = 1
    control = TrainerControl(should_save=True)
    state = TrainerState(stateful_callbacks=[first, control, second])
    assert list(state.stateful_callbacks) == ["EarlyStoppingCallback", "TrainerControl"]
    again = [
        EarlyStoppingCallback.from_state(kept)
        for kept in state.stateful_callbacks["EarlyStoppingCallback"]
    ]
    assert [vars(made) for made in again] == [vars(first), vars(second)]
    assert TrainerControl.from_state(state.stateful_callbacks["TrainerControl"]) == control


@pytest.mark.row("B25")
def test_theirs_are_kept_as_theirs() -> None:
    theirs = transformers.EarlyStoppingCallback(3)
    assert isinstance(theirs, ExportableState)
    assert not isinstance(theirs, TrainerControl)
    assert not isinstance(transformers.TrainerCallback(), ExportableState)
    state = TrainerState(stateful_callbacks=[theirs])
    assert state.stateful_callbacks == {"EarlyStoppingCallback": theirs.state()}


def test_a_callback_without_state_cannot_be_kept() -> None:
    with pytest.raises(TypeError, match="TrainerCallback cannot be saved"):
        TrainerState(stateful_callbacks=[TrainerCallback()])
    with pytest.raises(TypeError, match="abstract"):
        ExportableState()  # type: ignore[abstract]


def test_importing_compat_is_light() -> None:
    script = """
import json, sys
import drivetrain.compat
from drivetrain.compat import ProgressCallback, TrainerState
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(done.stdout))
    heavy = {"accelerate", "huggingface_hub", "mlflow", "tensorboard", "torch", "tqdm", "wandb"}
    assert not loaded & (heavy | {"transformers", "trackio", "peft", "datasets", "optuna"})


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        compat.no_such_name  # noqa: B018
    assert set(compat.__all__) <= set(dir(compat))

"""Random arguments: the same events, logs, files and weights as with transformers' Trainer."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from side_by_side import LIBRARIES, Side, accuracy, both, samples, without_times
from torch import Tensor
from torch.utils.data import IterableDataset

from drivetrain.compat import TrainerCallback

EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]
WHERE = ("on_train_begin", "on_epoch_begin", "on_step_begin", "on_step_end", "on_epoch_end")
STEPS = st.sampled_from([1, 2, 3, 5, 0.25])

ANY_ARGUMENTS = st.fixed_dictionaries(
    {
        "eval_strategy": st.sampled_from(["no", "steps", "epoch"]),
        "save_strategy": st.sampled_from(["no", "steps", "epoch", "best"]),
        "logging_strategy": st.sampled_from(["no", "steps", "epoch"]),
        "eval_steps": STEPS,
        "save_steps": STEPS,
        "logging_steps": STEPS,
        "per_device_train_batch_size": st.sampled_from([1, 2, 4, 7]),
        "gradient_accumulation_steps": st.sampled_from([1, 1, 2, 3]),
    },
    optional={
        "max_steps": st.sampled_from([1, 4, 7]),
        "num_train_epochs": st.sampled_from([1, 2, 1.5, 0.4]),
        "logging_first_step": st.just(True),
        "eval_on_start": st.just(True),
        "eval_delay": st.sampled_from([1, 3, 0.5]),
        "save_total_limit": st.sampled_from([1, 2]),
        "load_best_model_at_end": st.just(True),
        "metric_for_best_model": st.sampled_from(["first_loss", "eval_first_loss"]),
        "greater_is_better": st.booleans(),
        "per_device_eval_batch_size": st.sampled_from([1, 3, 64]),
        "eval_accumulation_steps": st.sampled_from([1, 2]),
        "prediction_loss_only": st.just(True),
        "lr_scheduler_type": st.sampled_from(["cosine", "constant_with_warmup", "inverse_sqrt"]),
        "warmup_steps": st.sampled_from([1, 3, 0.2]),
        "max_grad_norm": st.sampled_from([0, 0.1]),
        "optim": st.sampled_from(["sgd", "adagrad", "rmsprop", "adafactor"]),
        "weight_decay": st.just(0.1),
        "bf16": st.just(True),
        "data_seed": st.just(3),
        "train_sampling_strategy": st.just("sequential"),
        "include_num_input_tokens_seen": st.sampled_from(["no", "all"]),
        "save_only_model": st.just(True),
        "ignore_data_skip": st.just(True),
    },
)
ASKED = st.none() | st.tuples(
    st.sampled_from(WHERE),
    st.integers(0, 3),
    st.sampled_from(["training_stop", "epoch_stop", "save", "evaluate", "log"]),
)


def figures(logs: dict[str, Any]) -> dict[str, Any]:
    """Return logs without times, and without the entry that the printing callback removes for later
    callbacks.
    """
    return {k: value for k, value in without_times(logs).items() if k != "total_flos"}


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        return iter(samples(9))


def observer(side: str, reported: list[Any], asked: tuple[str, int, str] | None) -> Any:
    """Return a callback that writes down each event with the state and control that it saw, and
    sets a flag at one of them.
    """

    def event(name: str) -> Any:
        def happened(self: Any, args: Any, state: Any, control: Any, **given: Any) -> None:
            seen = {field.name: getattr(control, field.name) for field in fields(control)}
            best = Path(state.best_model_checkpoint or "").name, state.best_global_step
            reported.append((name, state.global_step, round(state.epoch or 0, 6), seen, best))
            reported.append((*sorted(given), figures(given.get("logs", {})).keys()))
            if asked is not None and asked[:2] == (name, state.global_step):
                setattr(control, f"should_{asked[2]}", True)

        return happened

    base = LIBRARIES[side].TrainerCallback
    return type("Observer", (base,), {name: event(name) for name in EVENTS})()


def run(
    side: Side, name: str, drawn: dict[str, Any], streamed: bool, asked: Any, resumed: bool
) -> dict[str, Any]:
    """Return everything observable of a run, and of one that resumes from its first checkpoint."""
    found: dict[str, Any] = {"events": []}

    def made() -> Any:
        return side.trainer(
            callbacks=[observer(name, found["events"], asked)],
            train_dataset=Stream() if streamed else samples(9),
            eval_dataset={"first": samples(5), "second": samples(3)},
            compute_metrics=accuracy,
            **drawn,
        )

    trainer = made()
    result = trainer.train()
    found["result"] = (result.global_step, result.training_loss, figures(result.metrics))
    found["logs"] = [figures(log) for log in trainer.state.log_history]
    checkpoints = sorted(side.folder.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    found["files"] = [checkpoint.name for checkpoint in checkpoints]
    found["evaluated"] = figures(trainer.evaluate())
    if resumed and checkpoints and int(checkpoints[0].name[11:]) < result.global_step:
        trainer = made()
        loss = trainer.train(resume_from_checkpoint=str(checkpoints[0])).training_loss
        found["resumed"] = (trainer.state.global_step, loss)
    found["weights"] = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return found


def assert_alike(ours: Any, theirs: Any, where: str = "") -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in theirs:
            assert_alike(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, (list, tuple)):
        for number, (mine, other) in enumerate(zip(ours, theirs)):  # noqa: B905
            assert_alike(mine, other, f"{where}[{number}]")
        assert len(ours) == len(theirs), where
    elif isinstance(theirs, Tensor):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=1e-4, nan_ok=True), where
    else:
        assert ours == theirs, where


@pytest.mark.slow
@pytest.mark.row("C38")
@settings(
    deadline=None,
    max_examples=60,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
)
@given(ANY_ARGUMENTS, st.sampled_from([False, False, True]), ASKED, st.booleans())
def test_any_arguments_train_as_there(
    drawn: dict[str, Any], streamed: bool, asked: tuple[str, int, str] | None, resumed: bool
) -> None:
    best = drawn["save_strategy"] == "best" or drawn.get("load_best_model_at_end")
    assume(not best or (drawn["eval_strategy"] != "no" and "metric_for_best_model" in drawn))
    # theirs reads a stream again and again where an epoch's one update is one that is incomplete,
    assume(not streamed or (drawn["gradient_accumulation_steps"] == 1 and asked is None))
    assume(not streamed or "max_steps" in drawn)
    assume(not (streamed and resumed))  # and is not stopped at the step where it was saved
    with TemporaryDirectory() as folder:
        ours, theirs = both(Path(folder))
        for side in (ours, theirs):
            side.folder.mkdir()
        try:
            there = run(theirs, "theirs", drawn, streamed, asked, resumed)
        except ValueError:  # arguments that contradict each other
            with pytest.raises(ValueError, match=r"metric_for_best_model|save_steps|strategy"):
                ours.trainer(**drawn)
            return
        assert_alike(run(ours, "ours", drawn, streamed, asked, resumed), there)

"""float16 with loss scaling, compared with transformers' Trainer, and TF32."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from side_by_side import (
    LIBRARIES,
    Classifier,
    arguments,
    assert_same_history,
    assert_same_weights,
    samples,
)
from torch import Tensor

from drivetrain import compat


class Loud(Classifier):
    """A model whose gradient fits float16 only after the loss scale has decreased."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        made = super().forward(x, labels)
        return {**made, "loss": made["loss"] * 40}


class Scaling(transformers.Trainer):
    """Makes accelerate scale the loss on the host, too; by default it does so on accelerators
    alone.
    """

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler("cpu")


KINDS: dict[str, Any] = {"ours": compat.Trainer, "theirs": Scaling}


class Listener:
    """Records the events around updates, in order, and whether the update was skipped."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, bool]] = []
        self.trainer: Any = None

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda args, state, control, **kwargs: None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("before", state.global_step, False))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("after", state.global_step, False))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        skipped = self.trainer.accelerator.optimizer_step_was_skipped
        self.events.append(("end", state.global_step, skipped))


def run(name: str, folder: Path, model: Any = Loud, resume: Any = None, **given: Any) -> Any:
    """Return a trained Trainer of that library, in float16, with `listener` as its callback."""
    changes = {"max_steps": 9, "fp16": True, "optim": "adamw_torch", **given}
    torch.manual_seed(1)
    args, listener = arguments(LIBRARIES[name], folder / name, **changes), Listener()
    made = KINDS[name](model(), args, train_dataset=samples(20), callbacks=[listener])
    listener.trainer, made.listener = made, listener
    made.train(resume_from_checkpoint=resume)
    return made


@pytest.mark.row("P1")
@pytest.mark.parametrize("accumulation", [1, 3])
def test_float16_is_theirs(tmp_path: Path, accumulation: int) -> None:
    changes = {"gradient_accumulation_steps": accumulation}
    ours, theirs = (run(name, tmp_path, Classifier, **changes) for name in KINDS)
    assert_same_history(ours.state.log_history, theirs.state.log_history)
    assert_same_weights(ours.model, theirs.model)
    exact = run("ours", tmp_path, Classifier, fp16=False, **changes)
    assert ours.state.log_history[0]["loss"] != exact.state.log_history[0]["loss"]


@pytest.mark.row("P1", "L11")
def test_a_step_that_overflows_is_left_out_and_counted(tmp_path: Path) -> None:
    ours, theirs = (run(name, tmp_path) for name in KINDS)
    assert_same_history(ours.state.log_history, theirs.state.log_history)
    assert_same_weights(ours.model, theirs.model)
    assert ours.listener.events == theirs.listener.events
    ends = [skipped for event, _, skipped in ours.listener.events if event == "end"]
    assert ends == [True] * 5 + [False] * 4 and ours.state.global_step == 9
    rates = [log["learning_rate"] for log in ours.state.log_history[:9]]
    assert rates[:6] == [0.05] * 6 and rates[6] < 0.05


@pytest.mark.row(
    "L11", status="differs", note="the schedule waits with fused AdamW, too; theirs does not"
)
def test_a_fused_optimizer_makes_no_difference(tmp_path: Path) -> None:
    plain, fused = (run("ours", tmp_path, optim=f"adamw_torch{end}") for end in ("", "_fused"))
    assert_same_history(plain.state.log_history, fused.state.log_history)
    theirs = run("theirs", tmp_path, optim="adamw_torch_fused")
    assert theirs.state.log_history[5]["learning_rate"] < 0.05  # not one update was made by then


@pytest.mark.row("P7")
@pytest.mark.parametrize("how", ["drivetrain", "hf", "theirs"])
def test_the_loss_scale_is_saved_and_restored(tmp_path: Path, how: str) -> None:
    name = "theirs" if how == "theirs" else "ours"
    form = {} if name == "theirs" else {"checkpoint_format": how}
    whole = run(name, tmp_path, save_strategy="steps", save_steps=7, **form)
    folder = tmp_path / name / "checkpoint-7"
    assert (folder / "scaler.pt").is_file() == (how != "drivetrain")
    again = run("ours", tmp_path / "again", resume=str(folder))
    assert_same_history(again.state.log_history[:-1], whole.state.log_history[:-1])
    ends = [skipped for event, _, skipped in again.listener.events if event == "end"]
    assert ends == [False, False]  # with a fresh scale the first would overflow
    if how == "hf":
        theirs = run("theirs", tmp_path / "again", resume=str(folder))
        assert_same_history(theirs.state.log_history[:-1], whole.state.log_history[:-1])


@pytest.mark.row("P10")
@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({}, None),
        ({"torch_compile": True}, True),
        ({"torch_compile": True, "bf16": True}, True),
        ({"torch_compile": True, "fp16": True}, None),
        ({"torch_compile": True, "tf32": False}, False),
    ],
)
def test_a_compiled_model_may_use_tf32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], allowed: bool | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    for before in (False, True):
        flags = [SimpleNamespace(allow_tf32=before) for _ in range(2)]
        monkeypatch.setattr(torch.backends.cuda, "matmul", flags[0])
        monkeypatch.setattr(torch.backends, "cudnn", flags[1])
        arguments(compat, tmp_path, **given)
        expected = before if allowed is None else allowed
        assert [flag.allow_tf32 for flag in flags] == [expected] * 2


@pytest.mark.row("P10")
def test_compiling_where_it_gains_little_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING):
        arguments(compat, tmp_path, torch_compile=True)
    assert "Ampere" in caplog.text

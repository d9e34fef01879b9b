"""Methods of HF's Trainer that a subclass overrides: each is called, or refused by name."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from side_by_side import arguments, both, classifier, losses, samples
from torch import nn

from drivetrain import compat
from drivetrain.compat.common.overrides import UNCALLED

STEPS: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 2,
    "max_steps": 4,
    "gradient_accumulation_steps": 2,
}

# --- the whole list -----------------------------------------------------------------------------

FOR_CALLERS = {
    "add_callback",  # in their constructor; ours fills the list at once
    "get_cp_size",  # no driver splits a sequence or a layer over ranks
    "get_sp_size",
    "get_tp_size",
}
"""Methods that transformers' own run calls, and compat's does not. Overriding them has
no effect.
"""
OVERRIDDEN = {
    "_get_dataloader": "axolotl",
    "_get_eval_sampler": "axolotl trl",
    "_get_train_sampler": "axolotl llamafactory llava trl",
    "_inner_training_loop": "trl",
    "_load_best_model": "sentence_transformers",
    "_load_from_checkpoint": "sentence_transformers",
    "_load_optimizer_and_scheduler": "trl",
    "_load_rng_state": "axolotl",
    "_maybe_log_save_evaluate": "trl",
    "_prepare_context_parallel_inputs": "axolotl",
    "_prepare_inputs": "axolotl trl",
    "_save": "axolotl flagembedding llamafactory llava sentence_transformers",
    "_save_checkpoint": "axolotl llava sentence_transformers trl",
    "_save_optimizer_and_scheduler": "axolotl",
    "_set_signature_columns_if_needed": "axolotl trl",
    "compute_loss": "axolotl flagembedding llamafactory sentence_transformers trl",
    "create_accelerator_and_postprocess": "axolotl",
    "create_optimizer": "axolotl llamafactory llava",
    "create_scheduler": "axolotl llamafactory",
    "evaluate": "axolotl sentence_transformers trl",
    "evaluation_loop": "sentence_transformers trl",
    "get_batch_samples": "llamafactory",
    "get_eval_dataloader": "sentence_transformers trl",
    "get_optimizer_cls_and_kwargs": "sentence_transformers",
    "get_test_dataloader": "sentence_transformers",
    "get_train_dataloader": "axolotl sentence_transformers trl",
    "log": "axolotl llamafactory sentence_transformers trl",
    "prediction_step": "axolotl llamafactory trl",
    "save_model": "axolotl llamafactory",
    "train": "axolotl trl",
    "training_step": "axolotl trl",
}
"""Methods that a run calls, with the libraries whose Trainers override them."""


def called(library: Any, folder: Path) -> set[str]:
    """Return the methods of the Trainer that a run calls through self. Each is overridden here."""
    calls: set[str] = set()

    def counted(name: str, method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.add(name)
            return method(*args, **kwargs)

        return call

    methods: dict[str, Any] = {}
    for name in dir(library.Trainer):
        if not name.startswith("__") and inspect.isfunction(getattr(library.Trainer, name)):
            wrapped = counted(name, getattr(library.Trainer, name))
            static = isinstance(inspect.getattr_static(library.Trainer, name), staticmethod)
            methods[name] = staticmethod(wrapped) if static else wrapped
    changes = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 3}
    args = arguments(
        library, folder, max_steps=2, eval_strategy="steps", load_best_model_at_end=True, **changes
    )
    kind = type("Counted", (library.Trainer,), methods)
    made = kind(classifier(), args, train_dataset=samples(), eval_dataset=samples(3))
    made.train()
    made.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    made.predict(samples(3))
    made.save_model()
    return calls


@pytest.mark.row("A8", "C38", "L18")
def test_what_a_subclass_overrides_is_called_or_refused(tmp_path: Path) -> None:
    """Override every method of transformers' Trainer that its own run calls."""
    ours, theirs = called(compat, tmp_path / "ours"), called(transformers, tmp_path / "theirs")
    assert len(theirs) > 60
    assert sorted(theirs - ours - UNCALLED.keys() - FOR_CALLERS) == []
    assert sorted(OVERRIDDEN.keys() - ours) == []


@pytest.mark.row(
    "C38",
    status="refused",
    note="what the kernel's loop would never call, such as `_run_epoch`, by name when the class is "
    "built",
)
@pytest.mark.parametrize("name", UNCALLED)
def test_what_nothing_would_call_is_refused_when_the_class_is_built(name: str) -> None:
    assert hasattr(transformers.Trainer, name)
    with pytest.raises(TypeError, match=rf"Mine\.{name} would never be called"):
        type("Mine", (compat.Trainer,), {name: lambda self, *args: None})
    mixin = type("Mixin", (), {name: lambda self, *args: None})
    with pytest.raises(TypeError, match=name):
        type("Mine", (mixin, compat.Seq2SeqTrainer), {})
    loop = {"_inner_training_loop": lambda self, **kwargs: self._run_epoch()}
    type("Mine", (compat.Trainer,), {name: lambda self: None, **loop})


def test_what_nothing_would_call_is_refused_when_it_comes_later(tmp_path: Path) -> None:
    trainer = both(tmp_path)[0].trainer(max_steps=1)
    trainer._run_epoch = lambda *args, **kwargs: None
    with pytest.raises(TypeError, match="_run_epoch would never be called"):
        trainer.train()


# --- clipping -----------------------------------------------------------------------------------


@pytest.mark.row("C38", "L1")
@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0])
def test_gradients_are_clipped_by_a_subclass(tmp_path: Path, max_grad_norm: float) -> None:
    found = []
    for side in both(tmp_path):

        class Clipping(side.trainer_type):  # type: ignore[misc, name-defined]
            def _clip_grad_norm(self, model: nn.Module) -> Any:
                norm = super()._clip_grad_norm(model)
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
                return norm

            def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
                return float(super()._get_grad_norm(model, grad_norm=grad_norm)) + 100

        trainer = _as(Clipping, side, **STEPS, max_grad_norm=max_grad_norm)
        trainer.train()
        norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
        found.append((norms, [*trainer.model.parameters()]))
    (ours, mine), (theirs, other) = found
    assert ours == pytest.approx(theirs, rel=1e-5) and min(ours) > 100
    torch.testing.assert_close(mine, other)


# --- the parts of the loop ----------------------------------------------------------------------


@pytest.mark.row("C38")
def test_the_preparation_of_a_subclass_is_called(tmp_path: Path) -> None:
    found = []
    for side in both(tmp_path):

        class Preparing(side.trainer_type):  # type: ignore[misc, name-defined]
            def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
                epochs, batches = super()._init_training_state(*args, **kwargs)
                self.state.seen_by_me = epochs, batches
                return epochs, batches

            def _prepare_for_training(self, max_steps: int, loader: Any, checkpoint: Any) -> Any:
                model, loader = super()._prepare_for_training(max_steps, loader, checkpoint)
                with torch.no_grad():
                    model.inner.weight.zero_()
                return model, list(loader)[:2] * 4

        trainer = _as(Preparing, side, **STEPS)
        trainer.train()
        found.append((trainer.state.seen_by_me, losses(trainer), trainer.state.global_step))
    assert found[0] == found[1]


@pytest.mark.row("C38")
def test_where_a_subclass_begins(tmp_path: Path) -> None:
    """Let a subclass start the epoch over after a checkpoint in its middle."""
    found = []
    for side in both(tmp_path):

        class StartsOver(side.trainer_type):  # type: ignore[misc, name-defined]
            def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
                super()._init_training_state(*args, **kwargs)
                return 0, 0

        _as(side.trainer_type, side, **STEPS).train()
        trainer = _as(StartsOver, side, **STEPS)
        trainer.train(resume_from_checkpoint=str(side.folder / "checkpoint-2"))
        found.append(losses(trainer))
    assert found[0] == found[1]


def test_another_model_than_the_wrapped_one_is_refused(tmp_path: Path) -> None:
    class Preparing(compat.Trainer):
        def _prepare_for_training(self, *args: Any) -> Any:
            return nn.Linear(2, 2), super()._prepare_for_training(*args)[1]

    with pytest.raises(TypeError, match="_prepare_for_training returned another model"):
        _as(Preparing, both(tmp_path)[0], **STEPS).train()


def _as(kind: Any, side: Any, **changes: Any) -> Any:
    """Return a Trainer of that library, whose class derives from the given one."""
    return type(side)(kind, side.arguments_type, side.folder).trainer(**changes)

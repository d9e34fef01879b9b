"""Callbacks, and methods of a subclass, that write to weights: each write is kept, or refused by
name at that moment. Averages can be swapped in and out.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from few_cases import only_quick
from side_by_side import QUIET, Classifier, losses, samples
from subjects import subject
from torch import Tensor

from drivetrain import compat
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import DrivetrainError

EVENTS = (
    "on_train_begin",
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_log",
    "on_prediction_step",
    "on_evaluate",
    "on_save",
    "on_epoch_end",
)


def model() -> Classifier:
    torch.manual_seed(1)
    return Classifier()


class Halves(compat.TrainerCallback):
    """Halves all weights at one event, once, after the third step or before the first one."""

    def __init__(self, event: str) -> None:
        self.done = False

        @torch.no_grad()
        def react(args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if not self.done and (state.global_step >= 3 or event == "on_train_begin"):
                self.done = True
                for weight in model.parameters():
                    weight.mul_(0.5)

        setattr(self, event, react)


class Averages(compat.TrainerCallback):
    """Averages the weights, and evaluates the averages from the second batch on."""

    averages: dict[str, Tensor] | None = None
    kept: dict[str, Tensor] | None = None

    @torch.no_grad()
    def on_step_end(self, *given: Any, model: Any = None, **kwargs: Any) -> None:
        named = dict(model.named_parameters())
        if self.averages is None:
            self.averages = {name: weight.detach().clone() for name, weight in named.items()}
        for name, average in self.averages.items():
            average.lerp_(named[name].detach(), 0.3)

    @torch.no_grad()
    def on_prediction_step(self, *given: Any, model: Any = None, **kwargs: Any) -> None:
        if self.kept is None and self.averages is not None:
            named = dict(model.named_parameters())
            self.kept = {name: weight.detach().clone() for name, weight in named.items()}
            for name, weight in named.items():
                weight.data.copy_(self.averages[name])

    def on_evaluate(self, *given: Any, model: Any = None, **kwargs: Any) -> None:
        if self.kept is not None:
            model.load_state_dict(self.kept)
            self.kept = None


class Whole(compat.TrainerCallback):
    """Writes whole weights that were kept before training."""

    def __init__(self) -> None:
        self.weights = model().state_dict()

    def on_evaluate(self, *given: Any, model: Any = None, **kwargs: Any) -> None:
        model.load_state_dict(self.weights)


class Nothing(compat.TrainerCallback):
    """Writes nothing."""


class HalvesInMethod(compat.Trainer):
    """Halves all weights once, after the third step, in each method that is run between steps."""

    method = ""

    def halve(self, method: str) -> None:
        if method == self.method and self.state.global_step >= 3:
            self.method = ""
            with torch.no_grad():
                for weight in self.model.parameters():
                    weight.mul_(0.5)

    def evaluate(self, *given: Any, **named: Any) -> Any:
        metrics = super().evaluate(*given, **named)
        self.halve("evaluate")
        return metrics

    def evaluation_loop(self, *given: Any, **named: Any) -> Any:
        made = super().evaluation_loop(*given, **named)
        self.halve("evaluation_loop")
        return made

    def save_model(self, *given: Any, **named: Any) -> None:
        super().save_model(*given, **named)
        self.halve("save_model")

    def log(self, *given: Any, **named: Any) -> None:
        super().log(*given, **named)
        self.halve("log")


class SwapsInMethod(compat.Trainer):
    """Averages the weights at each evaluation, and evaluates the averages."""

    averages: dict[str, Tensor] | None = None

    @torch.no_grad()
    def evaluate(self, *given: Any, **named: Any) -> Any:
        weights = dict(self.model.named_parameters())
        kept = {name: weight.detach().clone() for name, weight in weights.items()}
        self.averages = self.averages or kept
        for name, average in self.averages.items():
            average.lerp_(kept[name], 0.3)
        self.model.load_state_dict(self.averages)
        metrics = super().evaluate(*given, **named)
        self.model.load_state_dict(kept)
        return metrics


METHODS = ("evaluate", "evaluation_loop", "save_model", "log")
CALLBACKS = {kind.__name__: kind for kind in (Averages, Whole, Nothing)}


def trained(bench: Bench, *, folder: str, batch: int, what: str) -> dict[str, Any] | str:
    """A job: return losses and weights of a run with a callback, or the message of the refusal."""
    options = {"construct": "whole"} if bench.options.get("stage") == 3 else {}
    args = compat.TrainingArguments(
        output_dir=folder,
        **{**QUIET, "save_strategy": "steps", "save_steps": 1, "max_steps": 6},
        eval_strategy="steps",
        eval_steps=1,
        per_device_train_batch_size=batch // 2,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=batch,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        backend=bench.backend,
        backend_options={**bench.options, **options},
    )
    kind: type[compat.Trainer] = compat.Trainer
    callbacks: list[compat.TrainerCallback] = []
    if what in METHODS:
        kind = type("Halving", (HalvesInMethod,), {"method": what})
    elif what == SwapsInMethod.__name__:
        kind = SwapsInMethod
    else:
        callbacks.append(CALLBACKS[what]() if what in CALLBACKS else Halves(what))
    rows = samples(24)
    trainer = kind(model(), args, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)
    try:
        trainer.train()
    except DrivetrainError as error:
        return str(error)
    finally:
        trainer.end()
    evaluated = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    state = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return {"losses": [*losses(trainer), *evaluated], "weights": state}


def near(found: Any, expected: Mapping[str, Any]) -> None:
    assert not isinstance(found, str), found
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5)


ONE = subject("cpu")
SUBJECTS = {
    "ddp": subject("ddp", 2),
    "fsdp": subject("fsdp", 2),
    "mesh": subject("mesh", 2),
    "zero-2": subject("deepspeed", 2, {"stage": 2}),
    "zero-3": subject("deepspeed", 2, {"stage": 3}),
}
IN_UPDATE = ("on_pre_optimizer_step", "on_optimizer_step")


@pytest.mark.parametrize(
    ("driver", "event"),
    only_quick(product(SUBJECTS, (*EVENTS, *METHODS)), [("fsdp", "on_evaluate")]),
)
def test_what_is_written_is_kept_or_refused(driver: str, event: str, tmp_path: Path) -> None:
    found = SUBJECTS[driver].run(trained, folder=str(tmp_path / "two"), batch=4, what=event)
    for each in found if driver.startswith("zero") else ():
        if event in IN_UPDATE:
            assert isinstance(each, str)
            assert each.startswith(f"Halves.{event} wrote to inner.bias, inner.weight, outer.bias")
            assert "within an update of deepspeed" in each
            return
        if isinstance(each, str) and driver == "zero-3":
            name = "Halving" if event in METHODS else "Halves"
            assert each.startswith(f"{name}.{event} wrote to inner.bias, inner.weight, outer.bias")
            assert "GatheredParameters([weight], modifier_rank=0)" in each
            return
    (alone,) = ONE.run(trained, folder=str(tmp_path / "one"), batch=8, what=event)
    for each in found:
        near(each, alone)


@pytest.mark.parametrize(
    ("driver", "how"),
    [
        pytest.param(name, how, marks=() if name == "fsdp" else pytest.mark.slow)
        for name in SUBJECTS
        for how in ("Averages", "SwapsInMethod")
        if (name, how) != ("zero-3", "SwapsInMethod")  # whose weights are empty there
    ],
)
def test_averages_are_swapped_in_and_out(driver: str, how: str, tmp_path: Path) -> None:
    def run(subject: Subject, what: str) -> Any:
        batch = 8 if subject is ONE else 4
        return subject.run(trained, folder=str(tmp_path / what), batch=batch, what=what)[0]

    swapped = run(SUBJECTS[driver], how)
    near(swapped, run(ONE, how))
    for name, weight in run(SUBJECTS[driver], "Nothing")["weights"].items():
        assert torch.equal(swapped["weights"][name], weight), name


def test_whole_weights_are_refused_where_ranks_hold_shards(tmp_path: Path) -> None:
    for message in SUBJECTS["fsdp"].run(trained, folder=str(tmp_path), batch=4, what="Whole"):
        assert isinstance(message, str)
        assert message.startswith("Whole.on_evaluate computes with a plain tensor and a weight")
        assert "distribute_tensor(value, weight.device_mesh, weight.placements)" in message

"""Changes of weights after an update: `Trainer.after_update`, on any driver, sharded or not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from few_cases import only_quick
from side_by_side import QUIET, losses, samples
from subjects import subject
from torch import Tensor, nn

from drivetrain import compat
from drivetrain.conformance.bench import Bench
from drivetrain.kernel.errors import RecipeError


class Taught(nn.Module):
    """A student, and a teacher that follows it: by itself in the forward, or not."""

    def __init__(self, by_itself: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.student, self.teacher = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)
        self.by_itself = by_itself

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.by_itself:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.student.weight, 0.5)
        logits = self.student(x)
        taught = nn.functional.mse_loss(logits, self.teacher(x))
        loss = nn.functional.cross_entropy(logits, labels) + taught
        return {"loss": loss, "logits": logits}


class Following(compat.Trainer):
    def after_update(self, weights: Mapping[str, Tensor], number: int) -> None:
        for name in ("weight", "bias"):
            weights[f"teacher.{name}"].lerp_(weights[f"student.{name}"], 1 / (number + 1))
        weights["student.bias"].clamp_(-0.1, 0.1)


def trained(
    bench: Bench, *, folder: str, batch: int, by_itself: bool = False, resume: str | None = None
) -> dict[str, Any] | str:
    """A job: return losses and weights after six steps, or the message of the refusal."""
    options = {"construct": "whole"} if bench.options.get("stage") == 3 else {}
    args = compat.TrainingArguments(
        output_dir=folder,
        **{**QUIET, "save_strategy": "steps", "save_steps": 3, "max_steps": 6},
        per_device_train_batch_size=batch,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        backend=bench.backend,
        backend_options={**bench.options, **options},
    )
    kind = compat.Trainer if by_itself else Following
    trainer = kind(Taught(by_itself), args, train_dataset=samples(48))
    try:
        trainer.train(resume_from_checkpoint=resume)
    except RecipeError as error:
        return str(error)
    finally:
        trainer.end()
    state = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return {"losses": losses(trainer), "weights": state}


def by_hand() -> dict[str, Tensor]:
    """Train in a plain loop."""
    model, rows = Taught(by_itself=False), samples(48)
    named = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1)
    for number in range(1, 7):
        batch = rows[8 * (number - 1) : 8 * number]
        inputs = {name: torch.stack([row[name] for row in batch]) for name in batch[0]}
        optimizer.zero_grad()
        model(**inputs)["loss"].backward()
        optimizer.step()
        with torch.no_grad():
            for name in ("weight", "bias"):
                named[f"teacher.{name}"].lerp_(named[f"student.{name}"], 1 / (number + 1))
            named["student.bias"].clamp_(-0.1, 0.1)
    return {name: parameter.detach() for name, parameter in named.items()}


SUBJECTS = {
    "cpu": subject("cpu"),
    "ddp": subject("ddp", 2),
    "fsdp": subject("fsdp", 2),
    "zero-3": subject("deepspeed", 2, {"stage": 3}),
}


@pytest.mark.parametrize("driver", only_quick(SUBJECTS, ("cpu", "ddp", "fsdp")))
def test_a_teacher_follows_on_every_driver_and_is_resumed(driver: str, tmp_path: Path) -> None:
    subject, expected = SUBJECTS[driver], by_hand()
    given: dict[str, Any] = {"batch": 8 // (subject.num_processes or 1), "folder": str(tmp_path)}
    whole = subject.run(trained, **given)
    resumed = subject.run(trained, resume=str(tmp_path / "checkpoint-3"), **given)
    for found in (*whole, *resumed):
        assert found["losses"] == whole[0]["losses"]
        for name, weight in expected.items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-5, atol=1e-6)


def test_a_forward_that_writes_is_reported(tmp_path: Path) -> None:
    for said in SUBJECTS["fsdp"].run(trained, batch=4, folder=str(tmp_path), by_itself=True):
        assert said.startswith("teacher.weight") and "compat: Trainer.after_update" in said


def test_a_change_of_several_elements_is_refused(tmp_path: Path) -> None:
    class Normalised(compat.Trainer):
        def after_update(self, weights: Mapping[str, Tensor], number: int) -> None:
            weights["student.weight"].div_(weights["student.weight"].norm())

    args = compat.TrainingArguments(str(tmp_path), max_steps=2, **QUIET)
    trainer = Normalised(Taught(by_itself=False), args, train_dataset=samples(8))
    with pytest.raises(RecipeError, match=r"after_update takes norm of the weight"):
        trainer.train()


def test_a_loop_of_ones_own_calls_none(tmp_path: Path) -> None:
    class Looping(Following):
        def _inner_training_loop(self, *given: Any, **kwargs: Any) -> Any:
            return None

    args = compat.TrainingArguments(str(tmp_path), **QUIET)
    with pytest.raises(ValueError, match=r"Looping\.after_update beside a _inner_training_loop"):
        Looping(Taught(by_itself=False), args, train_dataset=samples(8))

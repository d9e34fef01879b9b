"""Callbacks that change a model and its optimizer during a run: the changes are saved and resumed,
or refused before the next update.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import Classifier, both, losses, ours
from torch import nn
from torch.nn.utils import prune
from transformers import TrainerCallback

from drivetrain import compat
from drivetrain.compat.optim.schedules import follow_groups
from drivetrain.kernel.errors import RecipeError, SettingError

STEPS: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}


class Change(TrainerCallback):
    """Calls the given function with model and optimizer after the third step."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            self.change(kwargs["model"], kwargs["optimizer"])


def pruned(model: Any, optimizer: Any = None) -> Any:
    prune.l1_unstructured(model.inner, "weight", 0.5)  # type: ignore[no-untyped-call]
    return model


def test_a_pruned_model_is_resumed_as_there(tmp_path: Path) -> None:
    found = []
    for side in both(tmp_path):
        whole = side.trainer(callbacks=[Change(pruned)], **STEPS)
        whole.train()
        again = side.trainer(lambda: pruned(Classifier()), **STEPS)
        again.train(resume_from_checkpoint=str(side.folder / "checkpoint-4"))
        assert losses(again) == losses(whole)
        found.append(losses(whole))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def half_frozen() -> Classifier:
    model = Classifier()
    model.outer.requires_grad_(False)
    return model


def thaw(model: Any, optimizer: Any) -> None:
    model.outer.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.outer.parameters()), "weight_decay": 0.0})


class Thawed(compat.Trainer):
    """A Trainer whose optimizer has the unfrozen group from the start."""

    def create_optimizer(self, model: Any = None) -> Any:
        optimizer = super().create_optimizer(model)
        thaw(self.model, optimizer)
        return optimizer


def test_a_group_that_is_added_learns_by_the_schedule_and_is_resumed(tmp_path: Path) -> None:
    """Resume with a Trainer that has the group from the start. transformers' schedules would end
    such a run.
    """
    side, rates = ours(tmp_path), []

    class Note(TrainerCallback):
        def on_pre_optimizer_step(self, *given: Any, optimizer: Any, **kwargs: Any) -> None:
            rates.append([group["lr"] for group in optimizer.param_groups])

    whole = side.trainer(half_frozen, callbacks=[Change(thaw), Note()], **STEPS)
    whole.train()
    assert [len(of_step) for of_step in rates] == [2] * 3 + [3] * 5
    assert all(len(set(of_step)) == 1 for of_step in rates)
    before = half_frozen()
    torch.manual_seed(1)
    assert not torch.equal(whole.model.outer.weight, before.outer.weight)
    second = type(side)(Thawed, side.arguments_type, side.folder)
    again = second.trainer(half_frozen, **STEPS)
    again.train(resume_from_checkpoint=str(side.folder / "checkpoint-4"))
    assert losses(again)[4:] == losses(whole)[4:]


def test_a_group_is_added_to_a_schedule_of_one_factor_alone() -> None:
    def made(*factors: Any) -> Any:
        rows = [nn.Parameter(torch.ones(1)) for _ in range(3)]
        optimizer = torch.optim.SGD([{"params": [row]} for row in rows[:2]], lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [*factors])
        optimizer.step()
        schedule.step()
        optimizer.add_param_group({"params": rows[2:], "lr": 4.0})
        follow_groups(schedule, optimizer.param_groups)
        optimizer.step()
        schedule.step()
        return [group["lr"] for group in optimizer.param_groups]

    def half(step: int) -> float:
        return 0.5**step

    assert made(half, half) == [0.25, 0.25, 1.0]
    with pytest.raises(SettingError, match=r"3 by now.*LambdaLR has factors for 2"):
        made(half, lambda step: 1.0)


def test_a_parameter_that_is_replaced_ends_the_run_before_the_next_update(tmp_path: Path) -> None:
    def replace(model: Any, optimizer: Any) -> None:
        model.inner.weight = nn.Parameter(torch.zeros_like(model.inner.weight))

    trainer = ours(tmp_path).trainer(callbacks=[Change(replace)], **STEPS)
    with pytest.raises(RecipeError, match=r"other parameters in the places of inner\.weight"):
        trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_backward_hook_that_clips_is_refused_where_it_is_not_exact(
    accumulated: int, tmp_path: Path
) -> None:
    def clip(module: nn.Module, given: Any, made: Any) -> Any:
        return tuple(grad / grad.norm() for grad in given)

    trainer = ours(tmp_path).trainer(max_steps=2, gradient_accumulation_steps=accumulated)
    trainer.model.outer.register_full_backward_hook(clip)
    if accumulated == 1:
        trainer.train()
        return
    with pytest.raises(RecipeError, match=r"clip' is registered on module 'outer' as a backward"):
        trainer.train()

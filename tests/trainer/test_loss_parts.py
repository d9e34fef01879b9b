"""Parts of a loss: each is logged with its mean, and measured in evaluations."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import CheckpointSettings, LossParts, Recipe, ScheduleSettings, Settings
from drivetrain.kernel.errors import RecipeError
from drivetrain.kernel.events import Logged
from drivetrain.trainer.fit import fit

ROWS = torch.randn(22, 3, generator=torch.Generator().manual_seed(1))


def parts(module: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    y = module(batch)
    return {"near": (y - 1).square().sum(), "small": 0.1 * y.abs().sum()}


def whole(module: torch.nn.Module, batch: Any) -> torch.Tensor:
    found = parts(module, batch)
    return found["near"] + found["small"]


SETTINGS = Settings(
    steps=6,
    global_batch=8,
    micro_batch=3,  # ragged: 3, 3 and 2, and 3 and 3 at the end of an epoch
    log_every=3,
    schedule=ScheduleSettings("constant"),
    checkpoint=CheckpointSettings(every=2),
)


def run(loss: Any, settings: Settings = SETTINGS, **how: Any) -> tuple[list[Logged], Any]:
    logged: list[Logged] = []

    def observe(event: object) -> None:
        logged.extend([event] if isinstance(event, Logged) else [])

    recipe = Recipe(
        lambda: torch.nn.Linear(3, 2), loss, ROWS, count_items=len, eval_data={"held_out": ROWS}
    )
    result = fit(recipe, settings, backend="cpu", observers=[observe], **how)
    return logged, result


def test_each_part_is_logged_and_the_sum_is_trained_on() -> None:
    plain, _ = run(whole)
    logged, result = run(LossParts(parts))
    assert [each.loss for each in logged] == [each.loss for each in plain]
    for each in logged:
        assert set(each.losses) == {"near", "small"}
        assert sum(each.losses.values()) == pytest.approx(each.loss, rel=1e-6)
    one_step = dataclasses.replace(SETTINGS, steps=1, global_batch=22)
    (only,), _ = run(LossParts(parts), one_step)
    module = torch.nn.Linear(3, 2)
    torch.manual_seed(0)
    with torch.no_grad():
        expected = parts(torch.nn.Linear(3, 2), ROWS)
    del module
    assert only.losses["near"] == pytest.approx(float(expected["near"]) / 22, rel=1e-6)
    assert only.losses["small"] == pytest.approx(float(expected["small"]) / 22, rel=1e-6)
    measured = result.metrics["held_out"]
    assert measured["near"] + measured["small"] == pytest.approx(measured["loss"], rel=1e-6)


def test_the_first_log_after_a_resume_covers_the_steps_before(tmp_path: Path) -> None:
    straight, _ = run(LossParts(parts))
    run(LossParts(parts), dataclasses.replace(SETTINGS, steps=4), out=tmp_path)
    resumed, _ = run(LossParts(parts), out=tmp_path, resume="auto")
    assert resumed[-1].losses == pytest.approx(straight[-1].losses, rel=1e-6)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (lambda module, batch: module(batch).sum(), "the parts of recipe.loss are tensor"),
        (lambda module, batch: {"a": module(batch)}, "part 'a' of recipe.loss is tensor"),
        (lambda module, batch: {"loss": module(batch).sum()}, "not 'loss', which is their sum"),
    ],
)
def test_what_are_no_parts_is_named(found: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        run(LossParts(found))


def test_a_loss_that_returns_parts_is_refused_by_name() -> None:
    with pytest.raises(RecipeError, match=r"recipe\.loss returned dict.*LossParts\(loss\)"):
        run(parts)

"""A learning rate that falls when a metric no longer improves, also in a resumed run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import EvaluateSettings, Recipe, ScheduleSettings, Settings
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import SettingError
from drivetrain.kernel.events import Logged
from drivetrain.trainer.optimizers import OptimizerSettings

from .scored import EVERY, recipe, run

FALLING = dataclasses.replace(
    EVERY,
    log_every=1,
    optimizer=OptimizerSettings(lr=1.0),
    schedule=ScheduleSettings("plateau", metric="score", patience=2, gamma=0.5),
)


def rates(seen: Sequence[Any]) -> list[float]:
    return [event.learning_rate for event in seen if isinstance(event, Logged)]


def with_schedule(**changes: Any) -> Settings:
    return dataclasses.replace(FALLING, schedule=dataclasses.replace(FALLING.schedule, **changes))


@pytest.mark.parametrize(
    ("scores", "changes", "expected"),
    [
        ([5, 4, 4, 4, 4, 4, 3, 3, 3, 0], {}, [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]),
        ([1, 2, 2, 2, 2, 2, 2, 2, 2, 2], {"mode": "max"}, None),
        ([9, 8.9, 8.8, 8.7, 8.6, 8.5, 8.4, 8.3, 8.2, 8.1], {"min_change": 0.35}, None),
        ([5.0] * 10, {"warmup": 4}, [0.25, 0.5, 0.75, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625]),
    ],
)
def test_rates_fall_as_those_of_torch(
    scores: Sequence[float], changes: dict[str, Any], expected: Sequence[float] | None
) -> None:
    settings = with_schedule(**changes)
    _, seen = run(recipe([*map(float, scores)]), settings)
    if expected is None:
        expected = of_torch(scores, settings.schedule)
        assert len({*expected}) > 2
    assert rates(seen) == pytest.approx([*expected])


def of_torch(scores: Sequence[float], schedule: ScheduleSettings) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(())], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer,
        schedule.mode,
        factor=schedule.gamma,
        patience=schedule.patience - 1,
        threshold=schedule.min_change,
        threshold_mode="abs",
    )
    found = []
    for score in scores:
        found.append(float(optimizer.param_groups[0]["lr"]))
        scheduler.step(score)
    return found


@pytest.mark.parametrize("steps", [3, 4, 5])
def test_a_resumed_run_falls_at_the_same_step(steps: int, tmp_path: Path) -> None:
    scores = [5.0, 4.0, 4.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0, 0.0]
    _, whole = run(recipe(scores), FALLING)
    _, first = run(recipe(scores), dataclasses.replace(FALLING, steps=steps), out=tmp_path / "run")
    _, rest = run(recipe(scores[steps:]), FALLING, out=tmp_path / "run", resume="auto")
    assert rates(first) + rates(rest) == rates(whole)


def trained(bench: Bench) -> list[float]:
    """A job: return the learning rates of a run whose metric never improves."""
    rows = torch.zeros(8, 1)
    made = Recipe(
        lambda: torch.nn.Linear(1, 1),
        lambda module, batch: module(batch).square().sum(),
        rows,
        eval_data={"held_out": rows},
        summarise=lambda sums: {"score": 1.0},
    )
    seen: list[Any] = []
    settings: dict[str, Any] = {"steps": 6, "global_batch": 4, "log_every": 1, "evaluate.every": 1}
    settings |= {"optimizer.lr": 1.0, "schedule.name": "plateau", "schedule.metric": "score"}
    settings |= {"schedule.patience": 2, "schedule.gamma": 0.5}
    bench.fit(made, settings, observers=[seen.append])
    return rates(seen)


def test_all_ranks_fall_alike() -> None:
    for found in Subject("ddp", 2).run(trained):
        assert found == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"name": "plateau"}, "schedule.metric is not set: set the metric"),
        ({"metric": "loss"}, "which only schedule.name=plateau uses"),
    ],
)
def test_a_metric_and_the_schedule_belong_together(schedule: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Settings(schedule=ScheduleSettings(**schedule))


def test_a_metric_that_is_not_measured_is_refused() -> None:
    nothing = dataclasses.replace(FALLING, evaluate=EvaluateSettings())
    with pytest.raises(SettingError, match=r"schedule\.metric is 'score', and nothing is measured"):
        run(recipe([]), nothing)
    with pytest.raises(SettingError, match="is to lower its learning rate by 'scores'"):
        run(recipe([1.0]), with_schedule(metric="scores"))

"""The steps in which a run evaluates and saves: by shares of an epoch, by batches, and by the
clock.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import CheckpointSettings, EvaluateSettings, Recipe, Settings
from drivetrain.kernel.errors import SettingError
from drivetrain.kernel.events import Evaluated, Saved
from drivetrain.trainer import policy
from drivetrain.trainer.fit import fit

DATA = torch.utils.data.TensorDataset(torch.arange(20.0)[:, None])


def squared(module: torch.nn.Module, batch: Any) -> torch.Tensor:
    return module(batch[0]).square().sum()


RECIPE = Recipe(lambda: torch.nn.Linear(1, 1), squared, DATA, eval_data={"held_out": DATA})


def run(settings: Settings, recipe: Recipe = RECIPE, **how: Any) -> list[Any]:
    events: list[Any] = []
    fit(recipe, settings, backend="cpu", observers=[events.append], **how)
    return events


@pytest.mark.parametrize(
    ("share", "steps"), [(0.5, [5, 10, 15, 20]), (0.3, [3, 6, 9, 12, 15, 18, 20]), (1.5, [15, 20])]
)
def test_evaluation_by_a_share_of_an_epoch(share: float, steps: list[int]) -> None:
    settings = Settings(
        epochs=2.0, global_batch=2, evaluate=EvaluateSettings(every_epochs=share, at_end=True)
    )
    assert [event.step for event in run(settings) if isinstance(event, Evaluated)] == steps


def test_a_share_needs_a_length() -> None:
    stream = dataclasses.replace(RECIPE, train_data=lambda: iter(DATA))
    settings = Settings(steps=3, evaluate=EvaluateSettings(every_epochs=0.5))
    with pytest.raises(SettingError, match=r"every_epochs is 0\.5, and the data has no"):
        run(settings, stream)


def test_evaluation_of_the_first_batches() -> None:
    """Require the mean over the samples of the evaluated batches."""

    def counted(module: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"sum": batch[0].sum()}

    recipe = dataclasses.replace(RECIPE, measure=counted)
    found = {}
    for most in (2, 50, None):
        evaluate = EvaluateSettings(max_batches=most, micro_batch=3)
        settings = Settings(steps=1, global_batch=2, evaluate=evaluate)
        (evaluated,) = (e for e in run(settings, recipe) if isinstance(e, Evaluated))
        found[most] = evaluated.metrics["sum"]
    assert found == pytest.approx({2: 2.5, 50: 9.5, None: 9.5})


def test_saving_by_the_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Save every five seconds, at two seconds a step. The save comes in the step after, when all
    ranks know.
    """
    now = iter(range(10_000))

    class Clock:
        monotonic = staticmethod(lambda: 2.0 * next(now))

    monkeypatch.setattr(policy, "time", Clock)
    checkpoint = CheckpointSettings(every_minutes=5 / 60, at_end=False, keep_last=9)
    settings = Settings(steps=12, global_batch=2, checkpoint=checkpoint)
    saved = [event.step for event in run(settings, out=tmp_path) if isinstance(event, Saved)]
    assert len(saved) >= 2
    assert all(2 <= later - earlier <= 5 for earlier, later in itertools.pairwise(saved))

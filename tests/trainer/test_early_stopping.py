"""A run ends when its evaluations no longer improve, even when it was resumed. The states of
observers are saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from drivetrain import (
    EarlyStopping,
    EvaluateSettings,
    Settings,
    StopSettings,
)
from drivetrain.kernel import events
from drivetrain.kernel.errors import (
    CheckpointDamaged,
    NonFiniteTraining,
    RecipeError,
    SettingError,
    UsageError,
)
from drivetrain.trainer.metric_names import metrics_by_name

from .scored import EVERY, recipe, run, squared


def stop(metric: str = "score", patience: int = 2, **how: Any) -> Settings:
    return dataclasses.replace(EVERY, stop=StopSettings(metric, patience, **how))


NAN = float("nan")


@pytest.mark.parametrize(
    ("scores", "mode", "min_change", "last"),
    [
        ([5, 4, 4, 5, 1], "min", 0.0, 4),
        ([5, 4, 5, 3, 3, 3, 0], "min", 0.0, 6),
        ([1, 2, 1, 1, 9], "max", 0.0, 4),
        ([9, 8.9, 8.8, 7, 1], "min", 0.5, 3),
        ([NAN, NAN, 1], "min", 0.0, 2),
        ([NAN, 3, NAN, float("-inf"), 1], "min", 0.0, 4),
        (range(10, 0, -1), "min", 0.0, 10),
    ],
)
@pytest.mark.parametrize("way", ["settings", "observer"])
def test_a_run_ends_when_its_metric_no_longer_improves(
    scores: Iterable[float],
    mode: Literal["min", "max"],
    min_change: float,
    last: int,
    way: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings, observers = EVERY, []
    if way == "settings":
        settings = stop("held_out.score", mode=mode, min_change=min_change)
    else:
        observers = [EarlyStopping("score", 2, mode, min_change)]
    result, seen = run(recipe([*map(float, scores)]), settings, observers=observers)
    assert (result.step, result.reason) == (last, "finished" if last == 10 else "stopped")
    printed = [event.message for event in seen if isinstance(event, events.Warned)]
    printed += capsys.readouterr().err.splitlines()
    assert len([words for words in printed if words.startswith("stopped early: ")]) == (last < 10)


def test_the_reason_names_the_best_and_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    run(recipe([5, 4, 4.5, 4.25, 0]), EVERY, observers=[EarlyStopping("score", 2)])
    assert capsys.readouterr().err == (
        "stopped early: score did not improve in the last 2 evaluations; the best was 4, at step "
        "2\n"
    )


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    scores = [5.0, 3.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0]
    out = tmp_path / "run"
    first = dataclasses.replace(stop(patience=4), steps=4)
    assert run(recipe(scores), first, out=out)[0].step == 4
    result, _ = run(recipe(scores[4:]), stop(patience=4), out=out, resume="auto")
    assert (result.step, result.reason) == (6, "stopped")
    # once more: no step is done; unless more patience is asked for
    again, seen = run(recipe([]), stop(patience=4), out=out, resume="auto")
    assert (again.step, again.reason) == (6, "stopped")
    assert not [event for event in seen if isinstance(event, events.StepEnded)]
    more, _ = run(recipe([4.0, 2.0, 1.0, 0.5]), stop(patience=6), out=out, resume="auto")
    assert (more.step, more.reason) == (10, "finished")


def test_what_was_seen_of_another_metric_does_not_count(tmp_path: Path) -> None:
    run(recipe([1.0, 2.0, 2.0]), dataclasses.replace(stop(patience=3), steps=3), out=tmp_path / "a")
    settings = stop("loss", patience=3)  # which is 1.0 each time
    result, _ = run(recipe([0.0] * 9), settings, out=tmp_path / "a", resume="auto")
    assert (result.step, result.reason) == (7, "stopped")


CHECKED = dataclasses.replace(EVERY.evaluate, sanity_check=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stop": StopSettings("scores"), "evaluate": CHECKED}, "stop.metric is 'scores', which"),
        ({"stop": StopSettings("scores")}, "held_out has no such metric; it has loss, score"),
        ({"stop": StopSettings("score"), "evaluate": EvaluateSettings()}, "set evaluate.every"),
    ],
)
def test_a_metric_that_is_never_measured_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        run(recipe([1.0] * 10), dataclasses.replace(EVERY, **changes))


def test_metrics_have_names() -> None:
    metrics = {"a": {"loss": 1, "b.loss": 2}, "b": {"loss": 3, "score": 4}}
    assert metrics_by_name(metrics) == {
        "loss": 1,
        "a.loss": 1,
        "a.b.loss": 2,
        "b.loss": 3,
        "b.score": 4,
    }
    assert metrics_by_name({}) == {}


def test_a_metric_needs_data() -> None:
    nothing = dataclasses.replace(recipe([]), eval_data={}, summarise=None)
    with pytest.raises(SettingError, match="the recipe has no eval_data"):
        run(nothing, stop())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"patience": 0}, "patience is 0"),
        ({"mode": "least"}, "mode is 'least'"),
        ({"min_change": -1.0}, "min_change is -1"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        EarlyStopping("loss", **arguments)


class Counter:
    """An observer with a state."""

    def __init__(self, more: Any = None) -> None:
        self.steps, self.more = 0, more

    def __call__(self, event: Any) -> None:
        self.steps += isinstance(event, events.StepEnded)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "more": self.more}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


def test_observers_with_a_state_are_saved_and_resumed(tmp_path: Path) -> None:
    plain = dataclasses.replace(recipe([]), eval_data={}, summarise=None)
    short = dataclasses.replace(EVERY, steps=3)
    run(plain, short, out=tmp_path / "a", observers=[Counter(), Counter()])
    first, second, new = Counter(), Counter(), Counter()
    run(plain, EVERY, out=tmp_path / "a", resume="auto", observers=[first, second, new])
    assert (first.steps, second.steps, new.steps) == (10, 10, 7)


@pytest.mark.parametrize(
    ("observer", "words"),
    [
        (EarlyStopping, r"has the class EarlyStopping; give an object of it: EarlyStopping\("),
        (5, "observers has 5; each must be a function"),
        (Counter(torch.ones(1)), "observer Counter cannot be saved as JSON"),
        (Counter(NAN), "observer Counter cannot be saved as JSON"),
    ],
)
def test_observers_that_cannot_be(observer: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=words):
        run(recipe([1.0] * 10), EVERY, observers=[observer], out=tmp_path / "run")


@pytest.mark.parametrize(
    "state", [{}, {"best": "1", "best_step": 1, "misses": 1}, {"best_step": -1, "misses": 0}, 5]
)
def test_a_state_that_is_no_state_is_damage(state: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    other = type("EarlyStopping", (Counter,), {"state_dict": lambda self: state})
    run(recipe([1.0]), dataclasses.replace(EVERY, steps=1), out=out, observers=[other()])
    with pytest.raises(CheckpointDamaged, match="EarlyStopping cannot take its state"):
        run(recipe([1.0] * 10), stop(), out=out, resume="auto")


def test_a_run_of_which_no_step_could_be_applied_fails() -> None:
    plain = dataclasses.replace(recipe([]), eval_data={}, summarise=None)
    bad = dataclasses.replace(plain, loss=lambda module, batch: squared(module, batch) * NAN)
    with pytest.raises(NonFiniteTraining, match="no step could be applied") as raised:
        run(bad, dataclasses.replace(EVERY, steps=3))
    assert "optimizer.lr" not in str(raised.value)
    assert isinstance(raised.value, UsageError)

"""Mistakes that would otherwise show after the last step, or never, end a run before its first
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import CheckpointSettings, EvaluateSettings, Recipe, ScheduleSettings, Settings
from drivetrain.checkpoint import named
from drivetrain.checkpoint.store import CheckpointStore
from drivetrain.data.stream import ReadAgain
from drivetrain.kernel.errors import (
    CheckpointNotFound,
    FailedAfterTraining,
    RecipeError,
    SettingError,
)
from drivetrain.trainer.fit import fit
from drivetrain.trainer.result import Result

Batch = Mapping[str, Tensor]


class Rows:
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": (x.sum() > 0).long()}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def summed(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["x"]), batch["y"], reduction="sum")


def mean(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch["x"]), batch["y"])


def hits(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
    right = (module(batch["x"]).argmax(1) == batch["y"]).float()
    return {"loss": summed(module, batch), "accuracy": right.sum()}


def share(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"accuracy": (module(batch["x"]).argmax(1) == batch["y"]).float().mean()}


def wrong(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"accuracy": batch["labels"].sum()}


def train(
    out: Path | None = None, settings: Mapping[str, Any] | None = None, **parts: Any
) -> Result:
    chosen = {"epochs": 2.0, "global_batch": 16, "micro_batch": 3, **(settings or {})}
    recipe = Recipe(**{"model": model, "loss": summed, "train_data": Rows(), **parts})
    schedule = ScheduleSettings("constant")
    return fit(recipe, Settings(schedule=schedule, **chosen), backend="cpu", out=out)


WITHOUT = {"evaluate": EvaluateSettings(sanity_check=False)}


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"loss": mean}, r"recipe.loss returns a mean for 'loss', .* Recipe\(loss_is='mean'\)"),
        ({"measure": share}, "recipe.measure returns a mean for 'accuracy'"),
        (
            {"measure": wrong},
            r"measure of eval_data\['held out'\], .* KeyError: 'labels' \(test_sanity.py:\d+, `ret",
        ),
        ({"summarise": lambda sums: {"f1": sums["f1"]}}, r"recipe.summarise .* KeyError: 'f1'"),
        ({"loss_is": "mean"}, "loss_is is 'mean', and recipe.loss returns a sum"),
    ],
)
def test_what_would_show_at_the_end_shows_before_the_first_step(
    parts: dict[str, Any], said: str
) -> None:
    with pytest.raises(RecipeError, match=said):
        train(eval_data={"held out": Rows()}, **parts)


class Stream:
    """A stream of rows, which can only be read from the front."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (Rows()[index] for index in range(50))


@pytest.mark.parametrize("stream", [Stream(), lambda: iter(Stream())], ids=["object", "function"])
def test_a_mean_shows_in_a_stream_too(stream: Any) -> None:
    with pytest.raises(RecipeError, match=r"recipe\.loss returns a mean for 'loss'"):
        train(train_data=stream, loss=mean)
    without = train(settings=WITHOUT, train_data=stream)
    assert train(train_data=stream).loss == without.loss


@pytest.mark.parametrize("wrap", [iter, lambda stream: ReadAgain(iter(stream))], ids=["", "again"])
def test_an_iterator_loses_nothing(wrap: Callable[[Stream], Any]) -> None:
    assert train(settings={"epochs": 1.0}, train_data=wrap(Stream())).step == 4


def test_without_the_check_a_mean_is_trained_on() -> None:
    assert train(settings=WITHOUT, loss=mean).loss < train(loss=summed).loss / 2


def test_a_mean_that_is_declared_trains_and_evaluates_as_a_sum() -> None:
    """Compare a sum and a mean over microbatches of 3, 3, 3, 3, 3 and 1."""
    parts = {"eval_data": {"held out": Rows()}}
    first, second = train(loss=summed, **parts), train(loss=mean, loss_is="mean", **parts)
    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    assert second.metrics["held out"] == pytest.approx(first.metrics["held out"], rel=1e-6)


def test_the_items_of_a_mean_are_counted_once() -> None:
    """Count in each microbatch of two epochs of 50 rows; compare with a sum."""
    losses, calls = [], []
    for how in ({"loss": summed}, {"loss": mean, "loss_is": "mean"}):
        counted: list[int] = []

        def count(batch: Batch, counted: list[int] = counted) -> int:
            counted.append(len(batch["y"]))
            return counted[-1]

        losses.append(train(settings=WITHOUT, count_items=count, **how).loss)
        calls.append(counted)
    assert calls[0] == calls[1]
    assert sum(calls[0]) == 100
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_nothing_of_training_changes() -> None:
    parts: dict[str, Any] = {"eval_data": {"held out": Rows()}, "measure": hits}
    assert train(**parts).loss == train(settings=WITHOUT, **parts).loss


def test_a_best_metric_that_nothing_measures_is_refused() -> None:
    keep = CheckpointSettings(best_metric="acc")
    with pytest.raises(SettingError, match=r"'acc', which no evaluation measures: .*accuracy"):
        train(eval_data={"held out": Rows()}, measure=hits, settings={"checkpoint": keep})


def test_the_best_evaluation_is_kept_also_between_saves(tmp_path: Path) -> None:
    """Let the metric improve until step 4, which is not a step of a save, and worsen
    from then on.
    """
    values = iter([0.1, 0.3, 0.2, 0.1, 0.05, 0.01])

    def reported(sums: Mapping[str, Tensor]) -> dict[str, float]:
        return {"accuracy": 0.0 if sums["samples"] < 50 else next(values)}

    keep = CheckpointSettings(every=5, keep_last=1, best_metric="accuracy", best_mode="max")
    settings = {"epochs": 3.0, "checkpoint": keep, "evaluate": EvaluateSettings(every=2)}
    parts: dict[str, Any] = {"eval_data": {"held out": Rows()}, "summarise": reported}
    result = train(tmp_path, settings, **parts)
    assert result.best == tmp_path / "checkpoints" / "checkpoint-000004"
    assert result.best.is_dir()
    assert result.checkpoint == tmp_path / "checkpoints" / "checkpoint-000012"
    best = tmp_path.with_name(f"{tmp_path.name}@best")
    assert named(best) == named(tmp_path / "checkpoints@best") == result.best
    values = iter([0.0] * 9)
    again = fit(
        Recipe(model=model, loss=summed, train_data=Rows(), **parts),
        Settings(steps=5, global_batch=16, schedule=ScheduleSettings("constant")),
        backend="cpu",
        resume=best,
    )
    assert again.step == 5


def test_a_missing_best_checkpoint_is_reported(tmp_path: Path) -> None:
    train(tmp_path / "run")
    with pytest.raises(CheckpointNotFound, match=r"the metric 'loss', which .* checkpoints: 1\)"):
        named(tmp_path / "run@best")


def test_an_error_for_the_best_checkpoint_names_the_metrics(tmp_path: Path) -> None:
    def right(module: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"right": hits(module, batch)["accuracy"]}

    train(tmp_path / "run", eval_data={"held out": Rows()}, measure=right)
    with pytest.raises(CheckpointNotFound, match=r"'loss', .* they have held out.right, right"):
        named(tmp_path / "run@best")


def test_a_last_evaluation_that_fails_costs_no_training(tmp_path: Path) -> None:
    def whole(sums: Mapping[str, Tensor]) -> dict[str, float]:
        return {"accuracy": 0.0 if sums["samples"] < 50 else float(sums["accuracy"])}

    with pytest.raises(FailedAfterTraining, match="last evaluation failed: KeyError: 'accuracy'"):
        train(tmp_path, eval_data={"held out": Rows()}, summarise=whole)
    assert (tmp_path / "checkpoints" / "checkpoint-000008").is_dir()


def test_the_best_is_looked_for_only_where_something_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[CheckpointStore] = []

    def best(store: CheckpointStore) -> None:
        asked.append(store)

    monkeypatch.setattr(CheckpointStore, "best", best)
    assert train(tmp_path).best is None
    assert not asked
    train(tmp_path / "measured", eval_data={"held out": Rows()})
    assert asked

"""Several models in one run, and updates that take turns. A law proves that turns are exact."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import EvaluateSettings, Models, Recipe, Settings, SpikeSettings, Turns
from drivetrain.kernel.errors import RecipeError
from drivetrain.kernel.events import Logged, LossSpiked
from drivetrain.run.format import describe
from drivetrain.run.records import record_of
from drivetrain.trainer.fit import fit

ROWS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def models() -> Models:
    teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    made = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 1), "teacher": teacher.requires_grad_(False)}
    return Models(made)


def far(models: Models, batch: Tensor) -> Tensor:
    return (models["a"](batch) - models["teacher"](batch)).square().sum()


def value(models: Models, batch: Tensor) -> Tensor:
    return (models["b"](models["a"](batch)) - 1).square().sum()


def trained(
    loss: Any, build: Callable[[], nn.Module] = models, steps: int = 2, **settings: Any
) -> tuple[Models, list[str]]:
    """Return the final models, and the parameters that required a gradient then."""

    def finish(module: nn.Module) -> Any:
        wanted = [name for name, p in module.named_parameters() if p.requires_grad]
        return module, wanted

    recipe = Recipe(model=build, loss=loss, train_data=ROWS, eval_data={"all": ROWS})
    chosen = Settings(steps=steps, global_batch=8, seed=5, **settings)
    found: tuple[Models, list[str]] = fit(recipe, chosen, backend="cpu", finish=finish).finish
    return found


def test_what_is_frozen_stays_in_evaluation_mode() -> None:
    several = models().train()
    assert several["a"].training and not several["teacher"].training
    assert not several["teacher"][1].training  # type: ignore[index]
    turns = Turns({"a": far, "b": value})
    module, wanted = trained(turns)
    assert wanted == ["a.weight", "a.bias", "b.weight", "b.bias"], "the last turn still holds"
    assert float(module["teacher"][1].num_batches_tracked) == 0  # type: ignore[index]


def test_several_learn_by_one_loss() -> None:
    torch.manual_seed(5)
    before = models()
    after, _ = trained(Turns({("a", "b"): value}), steps=1)
    for name, parameter in before.named_parameters():
        moved = not torch.equal(parameter, after.get_parameter(name))
        assert moved == (not name.startswith("teacher")), name


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": ("a", "b")},
        pytest.param({"compile": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_turns_are_the_same_recomputed_and_compiled(settings: Any) -> None:
    """Require equal results. A turn lasts until its backward ends, which recomputes activations."""
    turns = Turns({"a": value, "b": value})
    plain, _ = trained(turns, steps=4)
    other, _ = trained(turns, steps=4, **settings)
    for name, parameter in plain.named_parameters():
        assert torch.allclose(parameter, other.get_parameter(name), atol=1e-7), name


def test_each_loss_is_reported_by_its_name() -> None:
    turns = Turns({("a", "b"): value, "a": far})
    torch.manual_seed(0)
    reported = turns.measure(several := models(), ROWS)
    assert list(reported) == ["a+b", "a", "loss"]
    assert reported["loss"] == turns(several, ROWS) == reported["a+b"] + reported["a"]


@pytest.mark.parametrize(
    ("losses", "order"), [({}, None), ({"a": far}, ["b"]), ({"a": far, "b": value}, ["a"])]
)
def test_turns_and_losses_that_do_not_fit(losses: Any, order: Any) -> None:
    with pytest.raises(RecipeError, match="each turn needs a loss, and each loss a turn"):
        Turns(losses, order)


def test_models_are_called_with_a_function() -> None:
    with pytest.raises(RecipeError, match="were called with a Tensor; call them with"):
        models()(ROWS)


def test_turns_of_models_that_are_not_there() -> None:
    with pytest.raises(RecipeError, match="turns of critic; the models are a, b, teacher"):
        trained(Turns({"a": far, "critic": value}))
    with pytest.raises(RecipeError, match="made Linear; it must make"):
        trained(Turns({"a": far}), lambda: nn.Linear(4, 1))


def constant(name: str, value: float) -> Callable[[Models, Tensor], Tensor]:
    """Return a loss that has this value for each item."""

    def loss(models: Models, batch: Tensor) -> Tensor:
        return models[name](batch).sum() * 0 + value * len(batch)

    return loss


def events_of(loss: Any, settings: Settings, **kwargs: Any) -> list[Any]:
    seen: list[Any] = []
    recipe = Recipe(model=models, loss=loss, train_data=ROWS)
    fit(recipe, settings, backend="cpu", observers=[seen.append], **kwargs)
    return seen


def test_a_log_holds_the_loss_of_each_turn(tmp_path: Path) -> None:
    """Require each turn's loss, even if the run was resumed between two logs."""
    turns = Turns(
        {"a": constant("a", 1.0), ("b", "a"): constant("b", 100.0)}, ["a", "a", ("b", "a")]
    )
    settings = Settings(steps=8, global_batch=8, log_every=4)
    logs = [event for event in events_of(turns, settings) if isinstance(event, Logged)]
    assert [log.losses for log in logs] == [{"a": 1.0, "b+a": 100.0}] * 2
    assert [log.loss for log in logs] == [(3 + 100) / 4] * 2
    events_of(turns, dataclasses.replace(settings, steps=6), out=tmp_path)
    resumed = events_of(turns, settings, out=tmp_path, resume="auto")
    [last] = [event for event in resumed if isinstance(event, Logged)]
    assert (last.losses, last.loss) == ({"a": 1.0, "b+a": 100.0}, logs[1].loss)
    assert "loss 25.75 (a 1, b+a 100)" in str(describe(record_of(last) | EXTRA))


EXTRA = {"total_steps": 8, "seconds_left": 0.0, "item_name": "items"}


def test_a_spike_is_one_of_its_own_turn() -> None:
    """Compare each loss with those of its own turn: a turn whose losses are always larger has no
    spike, and hides none of the other turn.
    """

    def noisy(name: str, scale: float) -> Any:
        calls = iter(range(1000))

        def loss(models: Models, batch: Tensor) -> Tensor:
            call = next(calls)
            size = 3.0 if (name, call) == ("a", 40) else 1 + call % 5 / 100
            return models[name](batch).sum() * 0 + size * scale * len(batch)

        return loss

    turns = Turns({"a": noisy("a", 1.0), "b": noisy("b", 1000.0)}, ["a", "a", "b"])
    settings = Settings(
        steps=90,
        global_batch=8,
        spikes=SpikeSettings(factor=20.0),
        evaluate=EvaluateSettings(sanity_check=False),  # which would call the losses, too
    )
    spikes = [event for event in events_of(turns, settings) if isinstance(event, LossSpiked)]
    assert [(spike.step, spike.loss) for spike in spikes] == [(61, 3.0)]
    assert 1.0 <= spikes[0].usual <= 1.05

"""Several models in one run, and updates that take turns; that they are exact is a law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Models, Recipe, Settings, Turns, fit
from drivetrain.kernel.errors import RecipeError

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
    """The models at the end, and what asked for a gradient then."""

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
    """A turn holds until its backward has ended, which computes activations again."""
    turns = Turns({"a": value, "b": value})
    plain, _ = trained(turns, steps=4)
    other, _ = trained(turns, steps=4, **settings)
    for name, parameter in plain.named_parameters():
        assert torch.allclose(parameter, other.get_parameter(name), atol=1e-7), name


def test_each_loss_is_told_by_its_name() -> None:
    turns = Turns({("a", "b"): value, "a": far})
    torch.manual_seed(0)
    told = turns.measure(several := models(), ROWS)
    assert list(told) == ["a+b", "a", "loss"]
    assert told["loss"] == turns(several, ROWS) == told["a+b"] + told["a"]


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

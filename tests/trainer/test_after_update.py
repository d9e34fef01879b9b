"""Changes of weights after an update: their effects, and refusals by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import CheckpointSettings, OptimizerSettings, Recipe, Settings
from drivetrain.checkpoint import CheckpointReader
from drivetrain.kernel.errors import CapabilityRefused, RecipeError
from drivetrain.trainer.after_update import AfterUpdate
from drivetrain.trainer.fit import fit

LIMIT = 0.0625
kept: list[int] = []


def model() -> nn.Module:
    built = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4), nn.Linear(3, 4))
    built[2].requires_grad_(False)
    return built


def loss(module: nn.Module, batch: Tensor) -> Tensor:
    made = module[1](module[0](batch)) - batch
    return made.square().sum() * (float("nan") if float(batch[0, 0]) > 90 else 1.0)


def trained(change: Any, out: Path | None = None, *, bad: bool = False) -> dict[str, Tensor]:
    data = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    if bad:
        data[4:8] = 99.0
    recipe = Recipe(model, loss, list(data), after_update=change)
    settings = Settings(
        steps=3,
        global_batch=4,
        optimizer=OptimizerSettings(lr=0.1),
        checkpoint=CheckpointSettings(every=1, link_frozen=True, keep_last=3),
    )
    copied: dict[str, Tensor] = fit(
        recipe,
        settings,
        backend="cpu",
        out=out,
        finish=lambda module: {n: t.clone() for n, t in module.state_dict().items()},
    ).finish
    return copied


def test_weights_are_changed_after_each_applied_update() -> None:
    called: list[int] = []

    def clip(weights: Mapping[str, Tensor], number: int) -> None:
        called.append(number)
        for weight in weights.values():
            weight.clamp_(-LIMIT, LIMIT)

    assert all(float(w.abs().max()) <= LIMIT for w in trained(clip).values())
    assert sorted(set(called)) == [1, 2, 3]
    called.clear()
    trained(clip, bad=True)
    assert sorted(set(called)) == [1, 2]


def test_a_frozen_weight_that_follows_is_saved_in_each_step(tmp_path: Path) -> None:
    """Require new values in each checkpoint, also if frozen weights are links to those of the step
    before.
    """

    def follow(weights: Mapping[str, Tensor], number: int) -> None:
        weights["2.weight"].lerp_(weights["1.weight"], 0.5)

    trained(follow, tmp_path)
    folders = sorted(tmp_path.glob("checkpoints/checkpoint-*"))
    read = [CheckpointReader(folder).read("weights", "2.weight") for folder in folders]
    assert len(read) == 3
    assert not torch.equal(read[0], read[1])
    assert not torch.equal(read[1], read[2])


def by_norm(weights: Mapping[str, Tensor], number: int) -> None:
    for weight in weights.values():
        weight.div_(weight.norm().clamp(min=1.0))


def reads_a_number(weights: Mapping[str, Tensor], number: int) -> None:
    if bool((weights["0.weight"] > 1e9).any()):
        weights["0.weight"].zero_()


def mixes_places(weights: Mapping[str, Tensor], number: int) -> None:
    weights["0.weight"].copy_(weights["0.weight"].cumsum(0))


def draws(weights: Mapping[str, Tensor], number: int) -> None:
    weights["0.weight"].add_(torch.randn_like(weights["0.weight"]))


def counts(weights: Mapping[str, Tensor], number: int) -> None:
    kept.append(number)
    weights["0.weight"].mul_(1.0 / len(kept))


def puts(weights: Any, number: int) -> None:
    weights["0.weight"] = weights["0.weight"] * 0.5


def names_none(weights: Mapping[str, Tensor], number: int) -> None:
    weights["0.weights"].zero_()


def other_shape(weights: Mapping[str, Tensor], number: int) -> None:
    weights["0.weight"].add_(weights["1.weight"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (by_norm, "norm of the weight '0.weight'"),
        (reads_a_number, "any of the weight '0.weight'"),
        (mixes_places, "changes the weight '0.weight' in another way"),
        (draws, "changes the weight '0.weight' in another way"),
        (counts, "changes the weight '0.weight' in another way"),
        (names_none, "asks for the weight '0.weights'"),
        (other_shape, "the weights '0.weight' and '1.weight'"),
        (lambda weights, number: dict(weights), "returned dict"),
    ],
)
def test_what_is_not_done_to_each_element_by_itself_is_refused(change: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        trained(change)


def test_weights_are_written_in_place() -> None:
    with pytest.raises(TypeError, match="mappingproxy"):
        trained(puts)


def test_foreach_and_masks_pass() -> None:
    def change(weights: Mapping[str, Tensor], number: int) -> None:
        torch._foreach_mul_(list(weights.values()), 0.5)
        torch._foreach_lerp_(
            [weights["2.weight"], weights["2.bias"]], [weights["1.weight"], weights["1.bias"]], 0.5
        )
        first = weights["0.weight"]
        first.copy_(torch.where(first.abs() < 0.01, torch.zeros_like(first), first))
        first[first > 0.3] = 0.3

    assert float(trained(change)["0.weight"].max()) <= 0.3


def test_a_driver_that_changes_no_weights_refuses_by_name() -> None:
    recipe = Recipe(model, loss, after_update=by_norm)
    with pytest.raises(CapabilityRefused, match=r"recipe\.after_update.*'none'|'none'.*after_upd"):
        AfterUpdate(recipe, object(), "none")  # type: ignore[arg-type]

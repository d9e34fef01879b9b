"""Plans that partition only a part of the layers are refused in the plan's own words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Parallel
from drivetrain.backends.mesh.layers import plan_layers
from drivetrain.conformance.bench import Bench
from drivetrain.conformance.subject import Subject
from drivetrain.kernel.errors import RecipeError
from drivetrain.kernel.recipe import Recipe

WIDTH = 12
ATTENTION = {"*.qkv": "column", "*.out": "row"}
MLP = {"*.up": "column", "*.down": "row"}


class Block(nn.Module):
    """Attention of `heads` heads, and two layers."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (-1, WIDTH // self.heads)).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(parts, parts, parts)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        found: Tensor = self.down(torch.relu(self.up(x)))
        return found


def refused(bench: Bench, *, cases: dict[str, tuple[dict[str, str], int]]) -> dict[str, str]:
    """A job: return the refusal of each plan."""
    reported = {}
    for name, (plan, heads) in cases.items():
        recipe = Recipe(
            model=lambda heads=heads: nn.Sequential(Block(heads)),  # type: ignore[misc]
            loss=lambda module, x: module(x).square().sum(),
            train_data=list(torch.ones(8, 4, WIDTH)),
            parallel=Parallel(tensor=plan),
        )
        try:
            bench.fit(recipe, {"steps": 1, "global_batch": 4})
            reported[name] = "not at all"
        except Exception as error:
            reported[name] = f"{type(error).__name__}: {error}"
    return reported


@pytest.mark.slow
def test_what_is_named_in_a_part_only_is_refused_by_its_name() -> None:
    cases = {
        "no row": ({"*.up": "column", **ATTENTION}, 4),
        "no column": ({"*.down": "row", **ATTENTION}, 4),
        "heads": ({**ATTENTION, **MLP}, 3),
    }
    where = {"no row": "'0.down'", "no column": "'0.down'", "heads": "'0'"}
    for reported in Subject("mesh", 2, {"tensor": 2}).run(refused, cases=cases):
        for name, (plan, _) in cases.items():
            assert f"RecipeError: the model's forward failed in {where[name]}" in reported[name]
            assert "Parallel.tensor={" in reported[name]
            assert all(pattern in reported[name] for pattern in plan)


@pytest.mark.parametrize(("option", "value"), [("max_norm", 1.0), ("sparse", True)])
def test_an_embedding_that_needs_all_of_its_rows_is_refused(option: str, value: float) -> None:
    arguments: dict[str, Any] = {option: value}
    model = nn.Sequential(nn.Embedding(10, 4, **arguments))
    with pytest.raises(RecipeError, match=rf"Parallel\.tensor partitions '0' .* with {option}"):
        plan_layers(model, Parallel(tensor={"0": "vocabulary"}), 2)

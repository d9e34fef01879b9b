"""A loss of several parts, each of which is logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..kernel.errors import RecipeError
from ..kernel.recipe import Batch, Recipe, check_loss

__all__ = ["LossParts", "with_parts"]


class LossParts:
    """A `Recipe.loss` that is the sum of named parts.

    ::

        def parts(module, batch):
            return {"task": ..., "balance": ...}

        Recipe(..., loss=LossParts(parts))

    Each part is a scalar, the SUM over the items of the batch; their sum is trained on. `Logged`
    has the mean of each over the items of the global batches in `losses`, exact over microbatches
    and ranks; an evaluation measures each beside `loss`.
    """

    def __init__(self, parts: Callable[[nn.Module, Batch], Mapping[str, Tensor]]) -> None:
        self.parts = parts
        self._sums: dict[str, Tensor] = {}

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the sum of the parts."""
        return _sum_of(self._checked(module, batch))

    def measure(self, module: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return each part, and their sum as `loss`."""
        parts = self._checked(module, batch)
        return {**parts, "loss": _sum_of(parts)}

    def step(self, module: nn.Module, batch: Batch, microstep: Any) -> Tensor:
        """Train on the sum of the parts, as the default step does, and add up the parts. This is a
        `Recipe.step`."""
        with microstep.autocast():
            parts = self._checked(module, batch)
            total = _sum_of(parts)
        check_loss(total)
        items = microstep.num_items()
        weight = microstep.num_feeders / items if items else 0.0
        for name, part in parts.items():
            own = part.detach().float() * (weight * microstep.weight)
            self._sums[name] = self._sums[name] + own if name in self._sums else own
        return microstep.backward(total, weight)  # type: ignore[no-any-return]

    def take(self) -> dict[str, Tensor]:
        """Return the contribution of the microbatches since the last call to the mean
        of each part.
        """
        sums, self._sums = self._sums, {}
        return sums

    def _checked(self, module: nn.Module, batch: Batch) -> dict[str, Tensor]:
        parts: Any = self.parts(module, batch)
        if not isinstance(parts, Mapping) or not parts or "loss" in parts:
            raise RecipeError(
                f"the parts of recipe.loss are {parts!r:.200}; they must be a dict of scalars by "
                "name, such as {'task': ..., 'balance': ...}, and not 'loss', which is their sum"
            )
        for name, part in parts.items():
            if not isinstance(part, Tensor) or part.dim():
                raise RecipeError(
                    f"part {name!r} of recipe.loss is {part!r:.200}; it must be a scalar tensor: "
                    "the sum over the items of the batch"
                )
        return dict(parts)


def with_parts(recipe: Recipe) -> Recipe:
    """Return the recipe with the step and measure of its `LossParts`, if its loss is one. Raises
    `RecipeError` for a recipe that sets `step`, too."""
    loss = recipe.loss
    if not isinstance(loss, LossParts):
        return recipe
    if recipe.step is not None:
        raise RecipeError("recipe.loss is LossParts and recipe.step is set, too; take one of them")
    return replace(recipe, step=loss.step, measure=recipe.measure or loss.measure)


def _sum_of(parts: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([part.float() for part in parts.values()]).sum()

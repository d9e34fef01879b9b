"""Two ways to one loss, before the first update: whole and cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...data.parallel import Parallel
from ...kernel.plan import Plan
from ...kernel.recipe import Batch, Recipe
from ..common.random_state import rng_state, set_rng_state

__all__ = ["alike", "evaluating", "loss_to_compare"]

_TOLERANCE = {torch.float32: 1e-4}
_LOW_TOLERANCE = 5e-3
"""Relative, of a loss that is computed in bfloat16 or float16: roundings of 2**-8 average out over
positions, and a target that is lost at an end of a part is one of 64."""


def alike(seen: float, expected: float, plan: Plan) -> bool:
    """True if the losses differ by no more than roundings, or are no numbers both."""
    tolerance = _TOLERANCE.get(plan.precision.compute, _LOW_TOLERANCE)
    return not abs(seen - expected) > tolerance * abs(expected)


def loss_to_compare(recipe: Recipe, plan: Plan) -> Callable[[nn.Module, Batch], Tensor] | None:
    """By which parts and whole are compared; None where they are not."""
    asked = (recipe.parallel or Parallel()).compare
    if not (asked and plan.options.check):
        return None
    return recipe.loss if asked is True else asked


@contextmanager
def evaluating(module: nn.Module, device: torch.device) -> Iterator[None]:
    """In evaluation mode, and with draws that leave no trace: what is computed again, in another
    way, draws the same."""
    modes = [(part, part.training) for part in module.modules()]
    before = rng_state(device)
    module.eval()
    try:
        yield
    finally:
        set_rng_state(device, before)
        for part, training in modes:
            part.training = training

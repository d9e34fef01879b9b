"""Evaluation of losses and measures that take gradients: a gradient penalty, forces that are the
gradient of an energy. Gradients are off in an evaluation, and are turned on for these alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..kernel.batches import Group
from ..kernel.contract import Engine, Session
from ..kernel.evaluate import evaluate as measure
from ..kernel.recipe import Batch, Recipe

__all__ = ["evaluate"]

_LACKS_GRADIENTS = "does not require grad"
"""Words of torch where a gradient is taken of something that has none."""


def evaluate(
    session: Session, engine: Engine, recipe: Recipe, groups: Generator[Group, None, None]
) -> dict[str, float]:
    """Call `kernel.evaluate`, with gradients for a loss or measure that fails without them."""
    measured = recipe.measure and _WithGradientsIfNeeded(recipe.measure)
    able = replace(recipe, loss=_WithGradientsIfNeeded(recipe.loss), measure=measured)
    return measure(session, engine, able, groups)


class _WithGradientsIfNeeded:
    """A function of a module and a batch. It is first called without gradients, which takes less
    memory; once it has failed for want of them, with gradients.
    """

    def __init__(self, function: Callable[[nn.Module, Batch], Any]) -> None:
        self._function, self._needed = function, False

    def __call__(self, module: nn.Module, batch: Batch) -> Any:
        if not self._needed:
            try:
                return self._function(module, batch)
            except RuntimeError as error:
                if _LACKS_GRADIENTS not in str(error):
                    raise
                self._needed = True
        with torch.enable_grad():
            return _detached(self._function(module, batch))


def _detached(result: Any) -> Any:
    if isinstance(result, Mapping):
        return {name: _detached(value) for name, value in result.items()}
    return result.detach() if isinstance(result, Tensor) else result

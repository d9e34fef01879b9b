"""Lists the shapes of a mesh that a recipe allows, for `drivetrain plan`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from ...data.parallel import Parallel
from ...kernel.errors import RecipeError
from ...kernel.recipe import Recipe
from ..fsdp.sharding import divisors
from .layers import plan_of_model

__all__ = ["shapes"]

_MOST_TENSOR = 8
"""Ranks along `tensor` should be those of one machine, which seldom has more."""


def shapes(recipe: Recipe, world_size: int) -> Iterator[dict[str, int]]:
    """Yield the sizes of the mesh's dimensions by name, without those that only shard and
    replicate. A pipeline is not combined with other dimensions than `shard`."""
    parallel, numbers = recipe.parallel or Parallel(), divisors(world_size)
    tensors = [number for number in numbers if number <= _MOST_TENSOR]
    for tensor, context, expert in product(
        tensors if parallel.tensor or _has_plan(recipe) else [1],
        numbers if parallel.sequence else [1],
        numbers if parallel.experts else [1],
    ):
        rest, missed = divmod(world_size, tensor * context)
        if missed or tensor == context == expert == 1:
            continue
        for replicate in divisors(rest):
            shard = rest // replicate
            if not shard * context * tensor % expert:
                yield {
                    "replicate": replicate,
                    "shard": shard,
                    "context": context,
                    "tensor": tensor,
                    "expert": expert,
                    "pipeline": 1,
                }
    for pipeline in numbers[1:]:
        yield {"pipeline": pipeline, "shard": world_size // pipeline, "replicate": 1}


def _has_plan(recipe: Recipe) -> bool:
    """Return True if the model brings along a plan of its layers, even one that is refused."""
    experts = recipe.parallel.experts if recipe.parallel else ()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return bool(plan_of_model(recipe.model(), experts))
    except RecipeError:
        return True
    except Exception:  # a model that reads its values while it is built
        return False

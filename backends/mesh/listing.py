"""Lists the shapes of a mesh that a recipe allows, for `drivetrain plan`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ...data.parallel import Parallel
from ..fsdp.sharding import divisors

__all__ = ["shapes"]

_MOST_TENSOR = 8
"""Ranks along `tensor` should be those of one machine, which seldom has more."""


def shapes(parallel: Parallel, world_size: int) -> Iterator[dict[str, int]]:
    """Yield the sizes of the mesh's dimensions by name, without those that only shard and
    replicate. A pipeline is not combined with other dimensions than `shard`."""
    numbers = divisors(world_size)
    tensors = [number for number in numbers if number <= _MOST_TENSOR]
    for tensor, context, expert in product(
        tensors if parallel.tensor else [1],
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

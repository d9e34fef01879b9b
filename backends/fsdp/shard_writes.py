"""Writes of user's code to sharded weights. `engine`: an `FsdpEngine`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ...kernel.errors import RecipeError
from ..common.data_writes import noting_data
from ..common.writes import AFTER_UPDATE, lost_writes
from .written_line import written_in

__all__ = ["open_to_writes", "refusing_writes"]

_MIXED = "mixed torch.Tensor and DTensor"
_SIGNS = (
    _MIXED,
    "on inputs with different meshes",
    "more than one element of the written-to tensor",  # a placeholder of another stage's weight
)
"""Words of torch about a write to a weight that no rank holds whole."""


@contextmanager
def open_to_writes(engine: Any, where: str) -> Iterator[None]:
    """See `KeepsWrites`: within the block the module has its shards, which the next forward
    gathers. A forward in the block gathers some weights for long; they are freed after it."""
    engine.ready()
    freed = engine.module.register_forward_hook(lambda *_: engine.ready())
    try:
        with noting_data(DTensor) as noted:
            yield
    except RuntimeError as error:
        if _MIXED in str(error):
            raise _mixed(where, engine.driver_name) from error
        raise
    finally:
        freed.remove()
    if noted.replaced:
        named = engine.module.named_parameters()
        names = [name for name, parameter in named if id(parameter) in noted.replaced]
        if names:
            raise RecipeError(
                f"{where} assigned .data of {', '.join(names[:10])}, which has no effect on "
                f"{engine.driver_name}: a rank holds a shard of each weight. Write in place "
                "instead: weight.data.copy_(value), or weight.copy_(value) under torch.no_grad()"
            )


def _mixed(where: str, driver: str) -> RecipeError:
    return RecipeError(
        f"{where} computes with a plain tensor and a weight that {driver} has sharded, which is a "
        "DTensor there. Keep copies of weights as callbacks and observers see them "
        "({name: p.detach().clone() for name, p in model.named_parameters()}, made once training "
        "has begun): they are sharded alike. A whole tensor of another source becomes one by "
        "torch.distributed.tensor.distribute_tensor(value, weight.device_mesh, weight.placements). "
        f"Changes after each update belong in {AFTER_UPDATE}"
    )


@contextmanager
def refusing_writes(module: nn.Module, driver: str) -> Iterator[None]:
    """Enclose a forward. Raises `RecipeError` in place of torch's errors about a write to a weight
    of the module by what is not sharded alike."""
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error) for sign in _SIGNS) and (name := written_in(error, module)):
            raise lost_writes([name], driver) from error
        raise

"""Writes of user's code to sharded weights. `engine`: an `FsdpEngine`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ...kernel.errors import RecipeError
from ..common.data_writes import noting_data
from ..common.entered import MIXED_TENSORS
from ..common.writes import AFTER_UPDATE, lost_writes
from .written_line import written_in

__all__ = ["ShardWrites", "refusing_writes"]

_SIGNS = (
    MIXED_TENSORS,
    "on inputs with different meshes",
    "more than one element of the written-to tensor",  # a placeholder of another stage's weight
)
"""Words of torch about a write to a weight that no rank holds whole."""


class ShardWrites:
    """The weights that user's code writes to between forwards."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._shards: Sequence[nn.Parameter] = ()

    @contextmanager
    def open(self, where: str) -> Iterator[None]:
        """See `KeepsWrites`: within the block the module has its shards, which the next forward
        gathers. A forward in the block gathers some weights for long; they are freed after it."""
        engine = self._engine
        engine.ready()
        self._shards = self._shards or tuple(engine.module.parameters())
        before = self._versions()
        freed = engine.module.register_forward_hook(lambda *_: engine.ready())
        try:
            with noting_data(DTensor) as noted:
                yield
        except RuntimeError as error:
            if MIXED_TENSORS in str(error):
                raise _mixed(where, engine.driver_name) from error
            raise
        finally:
            freed.remove()
        if noted.replaced:
            self._refuse_assigned(noted.replaced, where)
        by_data = not noted.written.isdisjoint(map(id, self._shards))
        if by_data or self._versions() != before:
            engine.layers.written()

    def _versions(self) -> list[int]:
        """Return the versions of the shards."""
        return [shard._version for shard in self._shards]

    def _refuse_assigned(self, replaced: Collection[int], where: str) -> None:
        """Raise `RecipeError` for parameters, given by their ids, whose `data` was assigned."""
        named = self._engine.module.named_parameters()
        names = [name for name, parameter in named if id(parameter) in replaced]
        if names:
            raise RecipeError(
                f"{where} assigned .data of {', '.join(names[:10])}, which has no effect on "
                f"{self._engine.driver_name}: a rank holds a shard of each weight. Write in place "
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

"""Partitions of a model besides the sharding of units, such as tensor or pipeline parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from ...kernel.shards import Piece, Reader

__all__ = ["Partition"]


class Partition:
    """One way in which ranks partition a model. An engine calls each method on all ranks, in the
    order of this class. A partition defines the methods that it needs: here they do nothing.
    """

    recompute: Callable[..., Any] | None = None
    """Runs a forward, and again in backward; None: `torch.utils.checkpoint`."""
    can_be_undone = True
    """True if the user's module can be restored after training."""

    def replace_forwards(self, module: nn.Module) -> None:
        """Replace forwards of submodules. They are recomputed as replaced."""

    def choose_units(self, module: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
        """Return the units to shard on this rank."""
        return units

    def to_compile(self, part: nn.Module) -> Sequence[nn.Module]:
        """Return the modules to compile in place of `part`."""
        return (part,)

    def partition_layers(self, engine: Any) -> None:
        """Partition parameters before units are sharded. Placeholders of the parameters that this
        rank does not hold go to `engine.elsewhere`.
        """

    def sharding_of(self, unit: nn.Module) -> tuple[Any, Callable[..., Any]] | None:
        """Return the mesh to shard a unit over, and a function from a parameter to its placement;
        None: as other units.
        """
        return None

    def num_holders(self, name: str) -> int | None:
        """Return the number of ranks that hold a parameter or a shard of it; None: all ranks."""
        return None

    def attach(self, engine: Any) -> None:
        """Register hooks, and check the optimizer, after all other set-up."""

    def microbatch(self) -> AbstractContextManager[Any]:
        """Surround forward and backward of a microbatch."""
        return nullcontext()

    def forward(self, autocast: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
        """Surround the computation of a loss, under `autocast`."""
        return autocast

    def complete_gradients(self) -> None:
        """Add up over ranks the gradients that no library adds up, after the last backward."""

    def unused(self, names: Sequence[str]) -> Sequence[str]:
        """Return the parameters without a gradient on any rank. `names`: those of this rank."""
        return names

    def pieces(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Return the pieces that this rank saves, as the whole model has them."""
        return pieces

    def reader(self, reader: Reader) -> Reader:
        """Return a reader of a checkpoint that returns tensors as ranks hold them."""
        return reader

    def full_params(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Let the module compute as a whole one, while it has whole parameters."""
        return nullcontext()

    def whole(self, name: str, gathered: Tensor) -> Tensor:
        """Return the whole parameter, as the recipe's model knows it."""
        return gathered

    def as_held(self, name: str, whole: Tensor) -> Tensor:
        """Return a whole tensor in the order in which ranks hold the parameter's elements."""
        return whole

    def own_parts(self, parts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return this rank's part of each parameter with a key of the elements that it has."""
        return parts

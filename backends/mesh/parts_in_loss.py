"""Check that tensors of a part of the positions reach the loss only through a partitioned layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn

from ...data.nested import map_tensors
from ..common.graph import nodes_of
from .node_names import Mark, name_of, name_of_sharding
from .p2p import RECEIVES_OUTPUT

__all__ = ["PartsInLoss"]


class _PartialTensor(Mark):
    """Marks a tensor of a part of the positions."""


class PartsInLoss:
    """Marks the outputs of modules until `reached` is called. Compiled code shows no marks.

    `mesh`: the device mesh over whose ranks layers are partitioned. Raises `LibraryUnsupported` if
    this torch has other names for the nodes of a graph.
    """

    def __init__(self, modules: Iterable[nn.Module], marks: bool, mesh: Any) -> None:
        self._mark = name_of(_PartialTensor)
        self._barriers = (name_of_sharding(mesh), name_of(RECEIVES_OUTPUT)) if marks else ()
        """Names of the nodes at which a tensor enters a partitioned layer, or a later stage."""
        self._hooks = [module.register_forward_hook(_mark) for module in modules if marks]

    def reached(self, loss: Tensor) -> bool:
        """Return True if a marked tensor reaches the loss other than through partitioned layers."""
        for hook in self._hooks:
            hook.remove()
        return any(node.name() == self._mark for node in nodes_of(loss, self._barriers))


def _mark(module: nn.Module, args: Any, output: Any) -> Any:
    def marked(tensor: Tensor) -> Tensor:
        return cast(Tensor, _PartialTensor.apply(tensor)) if tensor.requires_grad else tensor

    return map_tensors(marked, output)

"""Names of nodes in a graph of autograd, checked against the installed torch.

A check that looks for a name which torch has changed would pass without looking at anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ...data.private_names import unsupported

__all__ = ["Mark", "marked_inputs", "name_of", "name_of_leaf", "name_of_sharding"]

_PURPOSE = "the comparison of partitioned layers with whole ones (backend mesh)"


class Mark(torch.autograd.Function):
    """An identity whose class marks a place in a graph of autograd, as the node of its name."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


@contextmanager
def marked_inputs(module: nn.Module, mark: type[Mark]) -> Iterator[None]:
    """Mark the graphs of autograd where a module begins."""

    def replace(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (mark.apply(args[0]), *args[1:]) if args else args

    hook = module.register_forward_pre_hook(replace)
    try:
        yield
    finally:
        hook.remove()


class _Probe(Mark):
    """Marks a place only to see the name of its node."""


def name_of(function: type[torch.autograd.Function]) -> str:
    """Return the name of the nodes that a function adds to a graph. Raises `LibraryUnsupported` if
    this torch names nodes in another way."""
    _check_suffix()
    return f"{function.__name__}Backward"


@cache
def _check_suffix() -> None:
    with torch.enable_grad():
        made = _Probe.apply(torch.zeros((), requires_grad=True))
    _require(made, f"{_Probe.__name__}Backward")


@cache
def name_of_leaf() -> str:
    """Return the name of the nodes at which a gradient is added to a parameter's."""
    leaf = torch.zeros((), requires_grad=True)
    return torch.autograd.graph.get_gradient_edge(leaf).node.name()


def name_of_sharding(mesh: Any) -> str:
    """Return the name of the nodes at which a plain tensor becomes a `DTensor`. `mesh`: a device
    mesh of this process. Raises `LibraryUnsupported` if this torch has another name."""
    leaf = torch.zeros((), device=mesh.device_type, requires_grad=True)
    with torch.enable_grad():
        made = DTensor.from_local(leaf, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return _require(made, "_FromTorchTensorBackward")


def _require(made: Any, name: str) -> str:
    """Return the name if the node that made the tensor has it."""
    seen = None if made.grad_fn is None else made.grad_fn.name()
    if seen != name:
        raise unsupported(f"node of autograd named {name} (it is {seen!r} here)", _PURPOSE)
    return name

"""What is of a part of the positions must not reach the loss but by a layer that is cut."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...data.nested import map_tensors

__all__ = ["PartsInLoss"]

_JOIN = ("_FromTorchTensorBackward", "_AnswerBackward")
"""In a graph of autograd: where a layer that is cut is given something, or a later stage."""


class _OfPart(torch.autograd.Function):
    """The same, by a name that is found in a graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


class PartsInLoss:
    """Marks what these modules make, until it is asked; in what is compiled marks are not seen."""

    def __init__(self, modules: Iterable[nn.Module], marks: bool) -> None:
        self._hooks = [module.register_forward_hook(_mark) for module in modules if marks]

    def reached(self, loss: Tensor) -> bool:
        """True if the loss is made of it otherwise than by layers that are cut."""
        for hook in self._hooks:
            hook.remove()
        waiting, seen = [loss.grad_fn], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen or node.name() in _JOIN:
                continue
            if node.name() == "_OfPartBackward":
                return True
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
        return False


def _mark(module: nn.Module, args: Any, output: Any) -> Any:
    def marked(tensor: Tensor) -> Tensor:
        return cast(Tensor, _OfPart.apply(tensor)) if tensor.requires_grad else tensor

    return map_tensors(marked, output)

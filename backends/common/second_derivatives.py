"""Refusal of losses that need second derivatives, on drivers that prepare weights for one backward.

A gradient penalty, or forces that are the gradient of an energy, put a gradient of the model's
output into the loss (`torch.autograd.grad(..., create_graph=True)`). That is a backward of its own,
after which such a driver frees the weights that it has gathered, or takes the gradients of the
update for complete, before the backward of the loss begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...kernel.errors import RecipeError

__all__ = ["refuse_second_derivatives"]


def refuse_second_derivatives(driver: str, module: nn.Module) -> None:
    """Raise `RecipeError`, from now on, in a backward from the outputs of `module` that is recorded
    for another one.
    """

    def refuse(grad: Tensor) -> None:
        if torch.is_grad_enabled():  # which is so in a recorded backward alone
            raise RecipeError(
                "recipe.loss takes a gradient of the model's output (create_graph=True, as a "
                f"gradient penalty does), and {driver} prepares its weights for one backward of "
                "a forward. Take the backend cpu or ddp"
            )

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            _register(refuse, output)

    module.register_forward_hook(watch)


def _register(hook: Any, output: Any) -> None:
    """Register a hook on each tensor of an output that has a gradient."""
    if isinstance(output, Tensor):
        if output.requires_grad:
            output.register_hook(hook)  # type: ignore[no-untyped-call]
    elif isinstance(output, Mapping):
        for value in output.values():
            _register(hook, value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            _register(hook, value)

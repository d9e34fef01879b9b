"""Refusal of losses that take gradients, on drivers that prepare weights for one backward.

A gradient penalty, or forces that are the gradient of an energy, put a gradient of the model's
output into the loss (`torch.autograd.grad(..., create_graph=True)`). That is a backward of its own,
after which such a driver frees the weights that it has gathered, or takes the gradients of the
update for complete, before the backward of the loss begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...kernel.errors import RecipeError

__all__ = ["refuse_gradients", "refuse_second_derivatives", "watch_outputs"]


def watch_outputs(
    module: nn.Module, arrived: Callable[[Tensor], None], returned: Callable[[], None] | None = None
) -> None:
    """Call `arrived` with each gradient of an output of `module`, from now on, and `returned` after
    a forward with an output that can have one."""

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and _register(arrived, output) and returned is not None:
            returned()

    module.register_forward_hook(watch)


def refuse_gradients(
    driver: str, module: nn.Module, refused: Callable[[], bool], words: str = "torch.autograd.grad"
) -> None:
    """Raise `RecipeError`, from now on, in a backward from the outputs of `module` in which
    `refused()` is true. `words`: how user's code asks for such a backward.
    """

    def refuse(grad: Tensor) -> None:
        if refused():
            raise RecipeError(
                f"recipe.loss takes a gradient of the model's output by {words}, and {driver} "
                "prepares its weights for one backward of a forward. Take the backend cpu or ddp"
            )

    watch_outputs(module, refuse)


def refuse_second_derivatives(driver: str, module: nn.Module) -> None:
    """Refuse a backward that is recorded for another one, in which alone gradients are enabled."""
    words = "torch.autograd.grad(..., create_graph=True), as a gradient penalty does"
    refuse_gradients(driver, module, torch.is_grad_enabled, words)


def _register(hook: Any, output: Any) -> int:
    """Register a hook on each tensor of an output that has a gradient; return their number."""
    if isinstance(output, Tensor):
        if output.requires_grad:
            output.register_hook(hook)  # type: ignore[no-untyped-call]
        return int(output.requires_grad)
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        return sum(_register(hook, value) for value in output)
    return 0

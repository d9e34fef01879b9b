"""Check how a loss uses the module that a driver wraps."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...kernel.errors import RecipeError
from .loss_gradients import refuse_gradients, refuse_second_derivatives

__all__ = ["Entered"]

_NOT_PREPARED = ("setStorage", "mark a variable ready only once")
"""Words of FSDP and DDP in a backward that does not begin at the outputs of a module."""


class Entered:
    """Notes the forwards of `module`, and is the context of a backward. A gradient that is computed
    without a forward, or past its output, is refused.
    `driver`: the name of one that prepares weights for one backward a forward, and so refuses
    second derivatives, too; with `only_backward` all gradients that are taken elsewhere.
    """

    def __init__(self, module: nn.Module, driver: str = "", only_backward: bool = False) -> None:
        self._entered, self._in_backward = True, False
        if only_backward:
            refuse_gradients(driver, module, lambda: not self._in_backward)
        elif driver:
            refuse_second_derivatives(driver, module)
        module.register_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, args: Any) -> None:
        self._entered = True

    def begin(self) -> None:
        """Note that a microbatch begins."""
        self._entered = False

    def __enter__(self) -> None:
        """Begin a backward. Raise `RecipeError` unless the module was called in this microbatch."""
        if not self._entered:
            raise RecipeError(
                "a loss was computed without calling the module that recipe.loss is given: weights "
                "were used past it, by a module kept aside, by module.module, or by a method other "
                "than forward, and their gradients would not be those of all ranks. Call "
                "module(...), and let its forward choose what is computed, by an argument or as "
                "drivetrain.Models does"
            )
        self._in_backward = True

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        """End the backward. Raise `RecipeError` for an error by which a library says that it had
        not prepared the weights for it.
        """
        self._in_backward = False
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NOT_PREPARED):
            raise RecipeError(
                "the loss depends on a part of the model by something other than its output, such "
                "as an attribute that a forward sets, or what a hook has kept, and the weights of "
                "that part were not prepared for its backward. Return it from the forwards on the "
                "way to the loss, or take the backend cpu"
            ) from error

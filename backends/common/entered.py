"""Check how a loss uses the module that a driver wraps."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...kernel.errors import RecipeError
from .second_derivatives import refuse_second_derivatives

__all__ = ["Entered"]


class Entered:
    """Notes the forwards of `module`. A gradient that is computed without one is refused.
    `driver`: the name of one that prepares weights for one backward a forward, and so refuses
    second derivatives, too.
    """

    def __init__(self, module: nn.Module, driver: str = "") -> None:
        if driver:
            refuse_second_derivatives(driver, module)
        self._entered = True
        module.register_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, args: Any) -> None:
        self._entered = True

    def begin(self) -> None:
        """Note that a microbatch begins."""
        self._entered = False

    def require(self) -> None:
        """Raise `RecipeError` unless the module was called in this microbatch."""
        if not self._entered:
            raise RecipeError(
                "a loss was computed without calling the module that recipe.loss is given: weights "
                "were used past it, by a module kept aside, by module.module, or by a method other "
                "than forward, and their gradients would not be those of all ranks. Call "
                "module(...), and let its forward choose what is computed, by an argument or as "
                "drivetrain.Models does"
            )

"""Check how a loss uses the module that a driver wraps.

A gradient penalty, or forces that are the gradient of an energy, put a gradient of the model's
output into the loss (`torch.autograd.grad(..., create_graph=True)`). That is a backward of its own.
A driver that prepares weights for one backward frees after it the weights that it has gathered, or
takes the gradients of the update for complete, before the backward of the loss begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...kernel.errors import RecipeError
from .graph import nodes_of

__all__ = ["MIXED_TENSORS", "Entered", "refuse_gradients", "refuse_second_derivatives"]

MIXED_TENSORS = "mixed torch.Tensor and DTensor"
"""Words of torch for an operation on a sharded and a whole tensor."""

_NOT_PREPARED = ("setStorage", "mark a variable ready only once", MIXED_TENSORS)
"""Words of FSDP and DDP in a backward that does not begin at the outputs of a module; the last are
those of a forward that is recomputed there.
"""


class Entered:
    """Notes the forwards of `module`, and encloses its backwards. A gradient that is computed
    without a forward, past its output, or not at all while other ranks wait for it, is refused.
    `refuse`: called for each gradient of an output, with whether it belongs to the backward of a
    loss; raises where the driver cannot take it.
    """

    def __init__(self, module: nn.Module, refuse: Callable[[bool], None] | None = None) -> None:
        self._entered, self._in_backward, self._sends = True, False, False
        self._unreached = False
        """True while outputs of this microbatch are watched, and no gradient has reached one."""
        self._refuse = refuse
        module.register_forward_pre_hook(self._note)
        module.register_forward_hook(self._watch)

    def _note(self, module: nn.Module, args: Any) -> None:
        self._entered = True

    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        asks = self._sends or self._refuse is not None
        if asks and torch.is_grad_enabled() and _register(self._reach, output):
            self._unreached = True

    def _reach(self, grad: Tensor) -> None:
        self._unreached = False
        if self._refuse is not None:
            self._refuse(self._in_backward)

    def begin(self, sends: bool = False) -> None:
        """Note that a microbatch begins. `sends`: the ranks wait for gradients in its backward."""
        self._entered, self._unreached, self._sends = False, False, sends

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Enclose a backward. Raise `RecipeError` unless the module was called in this microbatch
        and the loss depends on it, and for an error by which a library says that it had not
        prepared the weights.
        """
        if not self._entered:
            raise RecipeError(
                "a loss was computed without calling the module that recipe.loss is given: weights "
                "were used past it, by a module kept aside, by module.module, or by a method other "
                "than forward, and their gradients would not be those of all ranks. Call "
                "module(...), and let its forward choose what is computed, by an argument or as "
                "drivetrain.Models does"
            )
        self._in_backward = True
        try:
            yield
        except RuntimeError as error:
            if any(sign in str(error) for sign in _NOT_PREPARED):
                raise RecipeError(
                    "the loss depends on a part of the model by something other than its output, "
                    "such as an attribute that a forward sets, or what a hook has kept, and the "
                    "weights of that part were not prepared for its backward. Return it from the "
                    "forwards on the way to the loss, or take the backend cpu"
                ) from error
            raise
        finally:
            self._in_backward = False
        if self._unreached and self._sends and not _has_weights(loss):
            raise RecipeError(
                "recipe.loss called the module, and returned a loss that does not depend on its "
                "output, while other ranks wait for the gradients. For a batch without targets "
                "return zero times the output: (0.0 * module(...)).sum()"
            )


def _has_weights(loss: Tensor) -> bool:
    """True if the loss depends on a parameter."""
    variables = (getattr(node, "variable", None) for node in nodes_of(loss))
    return any(isinstance(each, nn.Parameter) for each in variables)


def refuse_gradients(driver: str, in_backward: bool) -> None:
    """Raise `RecipeError` for a gradient of an output outside the backward of a loss."""
    if not in_backward:
        raise _refusal(driver, "torch.autograd.grad")


def refuse_second_derivatives(driver: str, in_backward: bool) -> None:
    """Raise `RecipeError` for a gradient of an output in a backward that is recorded for another
    one: gradients are enabled in no other."""
    if torch.is_grad_enabled():
        raise _refusal(
            driver, "torch.autograd.grad(..., create_graph=True), as a gradient penalty does"
        )


def _refusal(driver: str, words: str) -> RecipeError:
    """`words`: how the user's code asks for such a backward."""
    return RecipeError(
        f"recipe.loss takes a gradient of the model's output by {words}, and {driver} prepares its "
        "weights for one backward of a forward. Take the backend cpu or ddp"
    )


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

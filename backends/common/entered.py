"""Check how a loss uses the module that a driver wraps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...kernel.errors import RecipeError
from .loss_gradients import refuse_gradients, refuse_second_derivatives, watch_outputs

__all__ = ["Entered"]

_NOT_PREPARED = ("setStorage", "mark a variable ready only once")
"""Words of FSDP and DDP in a backward that does not begin at the outputs of a module."""


class Entered:
    """Notes the forwards of `module`, and encloses its backwards. A gradient that is computed
    without a forward, past its output, or not at all while other ranks wait for it, is refused.
    `driver`: the name of one that prepares weights for one backward a forward, and so refuses
    second derivatives, too; with `only_backward` all gradients that are taken elsewhere.
    """

    def __init__(self, module: nn.Module, driver: str = "", only_backward: bool = False) -> None:
        self._entered, self._in_backward, self._sends = True, False, False
        self._unreached = False
        """True while outputs of this microbatch have a gradient function, and none was used."""
        if only_backward:
            refuse_gradients(driver, module, lambda: not self._in_backward)
        elif driver:
            refuse_second_derivatives(driver, module)
        module.register_forward_pre_hook(self._note)
        watch_outputs(module, self._reach, self._returned)

    def _note(self, module: nn.Module, args: Any) -> None:
        self._entered = True

    def _returned(self) -> None:
        self._unreached = True

    def _reach(self, grad: Tensor) -> None:
        self._unreached = False

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
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if isinstance(getattr(node, "variable", None), nn.Parameter):
                return True
            waiting += [before for before, _ in node.next_functions]
    return False

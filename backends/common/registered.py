"""Parameters that the user's code registers in a model during a run.

Torch calls a hook for each parameter and each module that is registered anywhere. A model in which
nothing is registered is never looked at.
"""

from __future__ import annotations

import functools
import sys
from itertools import islice
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ...kernel.errors import RecipeError

__all__ = ["Registered"]

_LIBRARIES = ("deepspeed", "torch.distributed", __package__.rpartition(".")[0])
_CALLS = 6
"""Most calls between a library and the registration of a parameter by it."""


class Registered:
    """Notes what is registered in a module, or in those that are put into it, from now on.
    Libraries that gather weights may do as they like."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.new: list[Tensor] = []
        """Parameters that were registered since the last `take`; looked at in each step."""
        self._inside = set(module.modules())
        _install()
        _watching.add(self)

    def take(self) -> dict[str, nn.Parameter]:
        """Return, by FQN, what was registered since the last call and is still in the module."""
        new, self.new = {id(each) for each in self.new}, []
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: parameter for name, parameter in named if id(parameter) in new}

    def refuse(self, driver: str) -> None:
        """Raise `RecipeError` for parameters that were registered, on a driver that has
        converted those that the model had when it was wrapped."""
        if self.new and (found := self.take()):
            raise RecipeError(
                f"{', '.join([*found][:10])}: these parameters were registered in the model during "
                f"the run, and {driver} has converted those that the model had when the run began: "
                "the new ones would be neither trained nor saved. Prune, replace or add in "
                "recipe.model (compat: before the Trainer is made), change values in "
                "place (Recipe.after_update), or take the backend cpu or ddp"
            )

    def note(self, module: nn.Module, value: nn.Module | nn.Parameter) -> None:
        """Called when something is registered in any module."""
        if module not in self._inside:
            return
        if isinstance(value, nn.Module):
            self._inside.update(value.modules())
            self.new.extend(value.parameters())
        else:
            self.new.append(value)


_watching: WeakSet[Registered] = WeakSet()


@functools.cache
def _install() -> None:
    torch_module.register_module_parameter_registration_hook(_note)
    torch_module.register_module_module_registration_hook(_note)


def _note(module: nn.Module, name: str, value: Any) -> None:
    current = module._modules if isinstance(value, nn.Module) else module._parameters
    if value is None or current.get(name) is value or not _watching or _is_library():
        return
    for each in [*_watching]:
        each.note(module, value)


def _is_library() -> bool:
    """True if one of the nearest callers is a library that gathers or shows weights."""
    frame = sys._getframe(2)

    def callers() -> Any:
        nonlocal frame
        while frame is not None:
            yield str(frame.f_globals.get("__name__"))
            frame = frame.f_back  # type: ignore[assignment]

    return any(name.startswith(_LIBRARIES) for name in islice(callers(), _CALLS))

"""Models that existed before the run: returned to the user whole when the run is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..kernel.contract import Engine
from ..kernel.optional import GivesBack

__all__ = ["GivenModel", "GivesBack"]


class GivenModel:
    """A recipe's `model` that records whether the module existed before the run: then the user may
    still hold it."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self._build = build
        self._was_there = False

    def __call__(self) -> nn.Module:
        made: set[int] = set()

        def note(module: nn.Module, name: str, parameter: Any) -> None:
            made.add(id(module))

        handle = register_module_parameter_registration_hook(note)
        try:
            module = self._build()
        finally:
            handle.remove()
        if isinstance(module, nn.Module):
            self._was_there = not any(id(part) in made for part in module.modules())
        return module

    def give_back(self, engine: Engine) -> None:
        """Return the module to its owner after a run. Called by all ranks."""
        if self._was_there and isinstance(engine, GivesBack):
            engine.give_back()

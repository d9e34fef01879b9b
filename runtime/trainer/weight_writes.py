"""Weights that user's code writes to between forwards: observers, and callbacks in compat."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

__all__ = ["KeepsWrites", "open_to_writes"]

_LIBRARIES = ("drivetrain", "transformers")
_NO_CONTEXT: AbstractContextManager[Any] = nullcontext()


@runtime_checkable
class KeepsWrites(Protocol):
    """An engine that does something for a write to a weight to last. Without it, the module's own
    parameters are all that an update, a forward and a save begin with."""

    def open_to_writes(self, where: str) -> AbstractContextManager[Any]:
        """Enclose user's code between two forwards, or in the optimizer's step; `where` names it.
        What this code writes in place to the module's parameters is in the next forward, update
        and save. Raises `RecipeError`, which names the weights and `where`, for a write that is
        not. Blocks may be nested. No ranks meet, and no device is waited for."""


def open_to_writes(
    engine: object, code: Callable[..., Any], where: str
) -> AbstractContextManager[Any]:
    """Return a context manager around a call of `code`; see `KeepsWrites`. Code of drivetrain and
    transformers writes to no weight."""
    module = getattr(code, "__module__", None) or type(code).__module__
    if module.partition(".")[0] in _LIBRARIES or not isinstance(engine, KeepsWrites):
        return _NO_CONTEXT
    return engine.open_to_writes(where)

"""Weights that user's code writes to between forwards: observers, and callbacks in compat."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..kernel.optional import KeepsWrites

__all__ = ["open_to_writes"]

_LIBRARIES = ("drivetrain", "transformers")
_NO_CONTEXT: AbstractContextManager[Any] = nullcontext()


def open_to_writes(
    engine: object, code: Callable[..., Any], where: str
) -> AbstractContextManager[Any]:
    """Return a context manager around a call of `code`; see `KeepsWrites`. Code of drivetrain and
    transformers writes to no weight."""
    module = getattr(code, "__module__", None) or type(code).__module__
    if module.partition(".")[0] in _LIBRARIES or not isinstance(engine, KeepsWrites):
        return _NO_CONTEXT
    return engine.open_to_writes(where)

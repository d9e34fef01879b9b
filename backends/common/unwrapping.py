"""The user's own module, as it was before a library wrapped it in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, cast

from torch import nn

__all__ = ["HOOK_TABLES", "unwrap", "unwrapped"]

HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
"""The attributes of a module that hold its hooks."""

_NOTES = "__composable_api"
"""The attribute in which `torch.distributed._composable` keeps its state of a module."""
_OWN = __package__.rpartition(".")[0]


def unwrap(
    module: nn.Module, libraries: tuple[str, ...], wrapper: type | None = None
) -> Callable[[], None]:
    """Take away the class `wrapper` that a library mixed into those of the parts, its notes on
    them and methods of one part alone, and hooks that are defined in Python modules of the
    `libraries` or of a driver. What is left can be copied. Returns what undoes it.
    """
    parts = list(module.modules())
    classes = [type(part) for part in parts]
    registries: list[Any] = [getattr(part, name) for part in parts for name in HOOK_TABLES]
    before = [dict(hooks) for hooks in registries]
    notes = [
        {
            name: part.__dict__.pop(name)
            for name, value in [*part.__dict__.items()]
            if name.startswith(_NOTES) or _is_method_of(libraries, value)
        }
        for part in parts
    ]
    for part in parts:
        if wrapper is not None and isinstance(part, wrapper):
            own = next(c for c in type(part).__mro__ if not issubclass(c, wrapper))
            part.__class__ = cast(type[nn.Module], own)
    for hooks in registries:
        for key, hook in list(hooks.items()):
            if str(getattr(hook, "__module__", "")).startswith((*libraries, _OWN)):
                del hooks[key]

    def undo() -> None:
        for part, own, noted in zip(parts, classes, notes, strict=True):
            part.__class__ = own
            part.__dict__.update(noted)
        for hooks, kept in zip(registries, before, strict=True):
            added = {key: hook for key, hook in hooks.items() if key not in kept}
            hooks.clear()
            hooks.update({**kept, **added})  # those that a first call has left to stay, say

    return undo


def _is_method_of(libraries: tuple[str, ...], value: object) -> bool:
    """True for a method whose function is defined in one of these packages."""
    if not isinstance(value, MethodType) or not isinstance(value.__func__, FunctionType):
        return False
    return str(value.__func__.__globals__.get("__name__")).startswith(libraries)


@contextmanager
def unwrapped(
    module: nn.Module, libraries: tuple[str, ...], wrapper: type | None = None
) -> Iterator[None]:
    """`unwrap`, and back."""
    undo = unwrap(module, libraries, wrapper)
    try:
        yield
    finally:
        undo()

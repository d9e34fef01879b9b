"""Shows the operations of a program on tensors, one by one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from .private_names import private_name

__all__ = ["replacing_operations"]


def replacing_operations(
    run: Callable[[Any, Any, Any, Any], Any], purpose: str
) -> AbstractContextManager[Any]:
    """Return a context in which `run(func, types, args, kwargs)` is called in place of each
    operation of torch, and returns `func(*args, **kwargs)`, or what is to replace it.

    `NotImplemented`: a subclass of tensors among `types` runs it, by operations that come here,
    too. Raises `LibraryUnsupported`, with `purpose`, if this torch cannot show its operations.
    """
    base = private_name("torch.utils._python_dispatch", "TorchDispatchMode", purpose=purpose)

    def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, types, args, kwargs or {})

    mode: AbstractContextManager[Any] = type(
        "Operations", (base,), {"__torch_dispatch__": dispatch}
    )()
    return mode

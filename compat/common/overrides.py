"""Checks of the methods that a subclass overrides: which replace ours, and which would never be
called."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from types import CodeType, FunctionType
from typing import Any

from ..arguments.driver_session import DriverSession
from ..arguments.reports import REPORTS
from ..errors import ArgumentRefused

__all__ = ["UNCALLED", "is_overridden", "is_replaced", "refuse_replaced", "refuse_uncalled"]

LOOP, _LOAD = "_inner_training_loop", "_load_optimizer_and_scheduler"

UNCALLED = {
    "_build_accelerator_args": "no Accelerator is built: give backend_options",
    "_defer_fsdp_gradient_reduction": "the driver reduces gradients",
    "_has_mixed_mesh_grads": "the driver takes the norm: override _clip_grad_norm",
    "_mixed_mesh_grad_norm": "the driver takes the norm: override _clip_grad_norm",
    "_run_epoch": "the kernel runs the epochs: override training_step or get_batch_samples, use a "
    "callback, or override _inner_training_loop as a whole",
    "_sync_replicated_trainable_parameters": "the driver keeps them equal",
    "_update_auto_batch_size": "memory that runs out is the loop's own matter: override "
    "_inner_training_loop, which is called with each batch size",
}
"""Methods of HF's Trainer that belong to its loop, with the alternative to each."""


def refuse_uncalled(kind: type, own: Collection[str] = ()) -> None:
    """Raises TypeError, naming the method, for a method of the class, or of its object (`own`),
    that only HF's loop would call.
    """
    if is_replaced(kind, LOOP):
        return
    for name, instead in UNCALLED.items():
        if hasattr(kind, name) or name in own:
            raise TypeError(f"{kind.__name__}.{name} would never be called: {instead}")


def refuse_replaced(kind: type, session: DriverSession) -> None:
    """Raises `ArgumentRefused`, naming the method, for an overridden method that cannot work on
    this driver."""
    driver = session.driver.name
    if is_replaced(kind, _LOAD) and session.is_sharded():
        raise ArgumentRefused(
            f"{kind.__name__}.{_LOAD}, which does not call the one that it overrides",
            driver,
            "the optimizer lies in parts on all ranks, and in no file that it could read: call "
            f"super().{_LOAD}(checkpoint)",
        )
    if is_replaced(kind, LOOP) and is_overridden(kind, "after_update"):
        raise ArgumentRefused(
            f"{kind.__name__}.after_update beside a {LOOP} that does not call the one that it "
            "overrides",
            driver,
            f"the loop of that class makes the updates: call super().{LOOP}(...), or change "
            "weights in the loop itself, where they are whole (backend='cpu' or 'ddp')",
        )
    if is_replaced(kind, LOOP) and driver == "deepspeed":
        raise ArgumentRefused(
            f"{kind.__name__}.{LOOP}, which does not call the one that it overrides",
            driver,
            "DeepSpeed makes the updates itself: use backend='ddp' or 'fsdp', or call "
            f"super().{LOOP}(...)",
        )

    if is_replaced(kind, LOOP):
        for name in (*REPORTS, "preemption_notice"):
            if value := getattr(session.args, name, None):
                raise ArgumentRefused(
                    f"{name}={value!r} beside {kind.__name__}.{LOOP}, which does not call the one "
                    "that it overrides",
                    driver,
                    f"the loop that it overrides measures this: leave {name} out, or call "
                    f"super().{LOOP}(...)",
                )


def is_overridden(kind: type, name: str) -> bool:
    """True if a subclass overrides a method."""
    return next(_methods(kind, name)) is not _ours(kind, name)


def is_replaced(kind: type, name: str) -> bool:
    """True if a subclass overrides a method without calling ours."""
    ours = _ours(kind, name)
    for method in _methods(kind, name):
        function = inspect.unwrap(getattr(method, "__func__", method))
        if function is ours:
            return False
        if not isinstance(function, FunctionType) or name not in _names(function.__code__):
            return True
    return False


def _methods(kind: type, name: str) -> Iterator[Any]:
    """Yield the methods of this name in the class and its bases, in the order in which `super()`
    finds them.
    """
    return (vars(base)[name] for base in kind.__mro__ if name in vars(base))


def _ours(kind: type, name: str) -> Any:
    own = __name__.rpartition(".common.")[0]
    bases = (base for base in kind.__mro__ if base.__module__.startswith(f"{own}."))
    return next((vars(base)[name] for base in bases if name in vars(base)), None)


def _names(code: CodeType) -> set[str]:
    """Return the names that a function and its nested functions look up."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, inner))

"""Settings of `torch.compile` under which compiled code computes what the model says."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ...checkpoint.gc_paused import gc_paused

__all__ = ["eagerly", "has_compiled", "look_at_hooks"]


def look_at_hooks() -> None:
    """Let torch look at the hooks of modules before it runs what it has compiled. By default it
    does not: a layer runs what was compiled for another layer of its class, without its own hooks,
    and a hook that is registered later is never called.

    torch keeps this setting for each thread.
    """
    with gc_paused():  # the first optimizer of a process would import the compiler anyway
        from torch._dynamo import config as compiler
    if hasattr(compiler, "skip_nnmodule_hook_guards"):
        compiler.skip_nnmodule_hook_guards = False


def has_compiled(module: nn.Module) -> bool:
    """True if the module or a part of it was compiled as a module."""
    return any(
        getattr(part, "_compiled_call_impl", None) is not None or hasattr(part, "_orig_mod")
        for part in module.modules()
    )


def eagerly() -> AbstractContextManager[Any]:
    """Run within the block what was compiled as it was before."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance

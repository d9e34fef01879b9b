"""Builds the model and its optimizer; recomputes activations, and casts."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...checkpoint.gc_paused import gc_paused
from ...kernel.errors import CapabilityRefused, RecipeError
from ...kernel.plan import Plan
from ...kernel.recipe import Recipe
from .buffers import buffers_kept
from .float8 import compute_in_float8

NO_CONTEXT: AbstractContextManager[None] = nullcontext()
"""Shared: entering it costs nothing and it holds no state."""


def build_model(recipe: Recipe, plan: Plan, device: torch.device | None) -> nn.Module:
    """The recipe's model on `device` (None: where the recipe put it), tied as it was, with
    checkpointed activations.
    """
    torch.manual_seed(plan.seed)
    module = recipe.model()
    if not isinstance(module, nn.Module):
        raise RecipeError(
            f"recipe.model returned {type(module).__name__}; it must build a torch.nn.Module"
        )
    if device is not None:
        module.to(device)
    compute_in_float8(module, plan)
    for pattern in plan.activation_checkpointing:
        recompute_activations(module, pattern)
    return module


def with_synced_batch_norm(
    module: nn.Module, asked: bool, device: torch.device, driver: str
) -> nn.Module:
    """With `asked`, batch normalisation takes mean and variance over the microbatches of all ranks,
    by `torch.nn.SyncBatchNorm`. Raises `CapabilityRefused` on the CPU, where torch has none."""
    if not asked:
        return module
    if device.type == "cpu":
        raise CapabilityRefused(
            "backend.sync_batch_norm=true",
            driver,
            "torch.nn.SyncBatchNorm works on GPUs only. Train there, or leave it out: statistics "
            "are those of each rank's microbatch then; or normalise by nn.GroupNorm",
        )
    synced: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
    return synced


def recompute_activations(
    module: nn.Module, pattern: str, run: Callable[..., Any] | None = None
) -> None:
    """Recompute in backward what the matching submodules computed in forward. `run(forward, ...)`
    does it; by default `torch.utils.checkpoint`.

    Chen et al., https://arxiv.org/abs/1604.06174. Raises `RecipeError` when nothing matches.
    """
    chosen = [
        part
        for name, part in module.named_modules()
        if name and (type(part).__name__ == pattern or fnmatch.fnmatchcase(name, pattern))
    ]
    if not chosen:
        classes = sorted({type(part).__name__ for part in module.modules()})
        raise RecipeError(
            f"activation_checkpointing pattern {pattern!r} matches no submodule; it may be a class "
            f"name ({', '.join(classes)}) or a pattern of names such as 'blocks.*'"
        )
    for part in chosen:
        # the forward is replaced, not the module, so that parameter names stay as they are; by a
        # `partial`, so that a deep copy of the module has one of its own
        has_buffers = any(True for _ in part.buffers())
        part.forward = partial(_recomputed, part, part.forward, run or _checkpoint, has_buffers)


def _checkpoint(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _recomputed(
    part: nn.Module,
    forward: Callable[..., Any],
    run: Callable[..., Any],
    has_buffers: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return run(_counted_once(part, forward) if has_buffers else forward, *args, **kwargs)


def _counted_once(part: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward; its second call (recomputing) leaves running statistics alone, since the first
    counted them."""
    again = False

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal again
        kept, again = (buffers_kept(part) if again else NO_CONTEXT), True
        with kept:
            return forward(*args, **kwargs)

    return counted


def build_optimizer(recipe: Recipe, module: nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer over the module's parameters. Raises `RecipeError`."""
    assert recipe.optimizer is not None, "the kernel fills recipe.optimizer in"
    named = list(module.named_parameters())
    if not any(parameter.requires_grad for _, parameter in named):
        raise RecipeError("the model has no parameter that requires a gradient: nothing to train")
    with gc_paused():  # the first optimizer of a process imports torch's compiler
        optimizer = recipe.optimizer(named)
    if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "step")):
        raise RecipeError(
            f"recipe.optimizer returned {type(optimizer).__name__}; it must build a "
            "torch.optim.Optimizer"
        )
    return optimizer


def kinds_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Itself, or those that it steps as one: each may treat parameters in another way."""
    return list(_several(optimizer).values()) or [optimizer]


def kind_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The one of `kinds_of` that steps this group."""
    return _several(optimizer).get(group.get("optimizer", ""), optimizer)


def _several(optimizer: torch.optim.Optimizer) -> Mapping[str, torch.optim.Optimizer]:
    several = getattr(optimizer, "optimizers", None)
    return several if isinstance(several, Mapping) else {}


def tied_groups(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """FQNs that are one parameter; the first of each group is the one `named_parameters` gives."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def without_gradient(module: nn.Module) -> list[str]:
    """FQNs of parameters that require a gradient and have none."""
    named = module.named_parameters()
    return [name for name, p in named if p.requires_grad and p.grad is None]


def autocast(plan: Plan, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Returns the implementation of `Engine.autocast` for the plan's compute dtype."""
    if plan.precision.compute == plan.precision.params:
        return lambda: NO_CONTEXT
    dtype = plan.precision.compute
    return lambda: torch.autocast(device.type, dtype)

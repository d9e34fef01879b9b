"""Builds the model and its optimizer; recomputes activations, and casts."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from ...checkpoint.gc_paused import gc_paused
from ...kernel.errors import CapabilityRefused, RecipeError
from ...kernel.plan import Plan
from ...kernel.recipe import Recipe
from .attached import carry_hooks, in_place_of
from .buffers import buffers_kept
from .compiled import look_at_hooks
from .float8 import compute_in_float8

NO_CONTEXT: AbstractContextManager[None] = nullcontext()
"""Shared: entering it costs nothing and it holds no state."""


def build_model(recipe: Recipe, plan: Plan, device: torch.device | None) -> nn.Module:
    """The recipe's model on `device` (None: where the recipe put it), tied as it was, with
    checkpointed activations.
    """
    look_at_hooks()
    torch.manual_seed(plan.seed)
    module = recipe.model()
    if not isinstance(module, nn.Module):
        raise RecipeError(
            f"recipe.model returned {type(module).__name__}; it must build a torch.nn.Module"
        )
    _refuse_lazy(module)
    _refuse_held(module)
    _make_expanded_buffers_writable(module)
    if device is not None:
        _move(module, device)
    compute_in_float8(module, plan)
    for pattern in plan.activation_checkpointing:
        recompute_activations(module, pattern)
    return module


def _move(module: nn.Module, device: torch.device) -> None:
    """Move the module. Where a parameter cannot change to the device in place, `Module.to` makes a
    new one for each of its names: they are tied again here, and keep what the user attached.
    """
    named = [
        (part, name, parameter)
        for part in module.modules()
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
    ]
    module.to(device)
    replaced: dict[int, nn.Parameter] = {}
    for part, name, old in named:
        new = part.get_parameter(name)
        if new is old:
            continue
        if id(old) not in replaced:
            replaced[id(old)] = in_place_of(old, new.detach())
            carry_hooks(old, replaced[id(old)])
        setattr(part, name, replaced[id(old)])


def _refuse_lazy(module: nn.Module) -> None:
    """Raises `RecipeError` for parameters that have no shape before a first forward."""
    named: list[tuple[str, Any]] = list(module.named_parameters())
    if lazy := [name for name, parameter in named if is_lazy(parameter)]:
        raise RecipeError(
            f"recipe.model made {', '.join(lazy[:10])} without a shape (nn.LazyLinear, say): what "
            "has none can be neither placed nor given to an optimizer. Call the model with a batch "
            "in recipe.model, before it is returned; or give the sizes"
        )


_HELD: WeakSet[nn.Module] = WeakSet()
"""Modules that an engine has changed in place, and not given back."""


def hold(module: nn.Module) -> None:
    """Note that an engine changes this module in place."""
    _HELD.update(module.modules())


def release(module: nn.Module) -> None:
    """Note that the module is as it was before an engine changed it."""
    _HELD.difference_update(module.modules())


def _refuse_held(module: nn.Module) -> None:
    """Raises `RecipeError` for a model that another run has partitioned, and not given back
    whole."""
    for name, part in module.named_modules():
        if part in _HELD:
            raise RecipeError(
                "recipe.model returned a model of which another run has partitioned "
                f"{name or 'all'!r} over ranks: it is not given back whole while that run "
                "continues, nor after an error, nor with pipelines or experts, nor as a part of a "
                "model. Build a new model, and load what was saved into it (load_state_dict)"
            )


def refuse_sparse(module: nn.Module, driver: str) -> None:
    """Raises `CapabilityRefused` for embeddings whose gradients are sparse, which neither torch nor
    DeepSpeed can shard."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    for name, part in module.named_modules():
        if isinstance(part, kinds) and part.sparse:
            raise CapabilityRefused(
                f"{type(part).__name__}(sparse=True) in {name or 'the model'!r}",
                driver,
                "its gradients are sparse, and gradients are sharded here, which is supported for "
                "dense ones alone. Set sparse=False, or take the backend ddp",
            )


def _make_expanded_buffers_writable(module: nn.Module) -> None:
    """Give expanded buffers memory of their own: torch refuses to write to elements that share
    one, as resuming does."""
    for buffer in module.buffers():
        if any(
            size > 1 and not step for size, step in zip(buffer.shape, buffer.stride(), strict=True)
        ):
            buffer.data = buffer.data.contiguous()


def make_contiguous(parameters: Iterable[nn.Parameter]) -> None:
    """Lay the parameters out row by row, for drivers that shard them as flat memory. The
    model computes the same from them: `channels_last` says how memory is ordered, and nothing
    else."""
    for parameter in parameters:
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def with_synced_batch_norm(
    module: nn.Module, asked: bool, device: torch.device, driver: str
) -> nn.Module:
    """If `asked`, let batch normalisation take mean and variance over the microbatches of all
    ranks, by `torch.nn.SyncBatchNorm`. Raises `CapabilityRefused` on the CPU, which torch does not
    support for it."""
    if not asked:
        return module
    if device.type == "cpu":
        raise CapabilityRefused(
            "backend.sync_batch_norm=true",
            driver,
            "torch.nn.SyncBatchNorm works on GPUs only. Train on GPUs, or leave it out: statistics "
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
    for kind in kinds_of(optimizer):
        _refuse_closure(kind)
    return optimizer


def _refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raises `RecipeError` for an optimizer that evaluates the loss again in its step, as LBFGS
    does, and SAM, which is known by its `first_step` and `second_step`."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    needed = closure is not None and closure.default is inspect.Parameter.empty
    if needed or all(hasattr(optimizer, name) for name in ("first_step", "second_step")):
        raise RecipeError(
            f"the optimizer {type(optimizer).__name__} wants a closure, by which it evaluates the "
            "loss again within its step; here an update is one gradient, which is clipped and "
            "applied once. A second gradient at moved weights (SAM) belongs into Recipe.step: move "
            "the weights there, call microstep.backward, and move them back, under an optimizer "
            "such as torch.optim.SGD (backends cpu and ddp; docs/optimizers.md). A line "
            "search (LBFGS) needs a loop of its own; take torch.optim.AdamW, for example"
        )


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

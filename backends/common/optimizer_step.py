"""Step a torch optimizer without the overhead that torch repeats in each step.

For a small model this overhead is most of a step: torch opens a range for profilers around it,
updates groups with equal settings one after the other, and inspects each parameter again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim import optimizer as hooks

__all__ = ["draws_nothing", "take_step"]


def _code_of_wrapper() -> Any:
    """Return the code of the wrapper that torch puts around `step` of each optimizer class: it runs
    hooks in a profiler range. Return None if this torch lacks a name that the steps below use:
    each step is then called unchanged.
    """
    named = (
        (hooks, "_global_optimizer_pre_hooks"),
        (hooks, "_global_optimizer_post_hooks"),
        (profiler, "_is_profiler_enabled"),
        (torch, "_foreach_add_"),
        (torch, "_fused_adam_"),
        (torch, "_fused_adamw_"),
    )
    if not all(hasattr(module, name) for module, name in named):
        return None
    wrap = getattr(Optimizer, "profile_hook_step", None)
    return None if wrap is None else getattr(wrap(print), "__code__", None)


_PROFILED_STEP = _code_of_wrapper()


def take_step(optimizer: Optimizer) -> None:
    """Call `optimizer.step()`, with groups of equal settings as one, and without the profiler range
    while no profiler is running. With hooks, or a `step` of the user's, call it unchanged."""
    if not _has_plain_step(optimizer) or profiler._is_profiler_enabled:
        optimizer.step()
        return
    groups, joined = optimizer.param_groups, _joined(optimizer)
    if _update_fused(optimizer, joined):
        return
    optimizer.param_groups = joined
    try:
        type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    finally:
        optimizer.param_groups = groups


_ADAM = (torch.optim.Adam, torch.optim.AdamW)
_UNUSUAL = ("amsgrad", "capturable", "differentiable")


def _update_fused(optimizer: Optimizer, groups: list[dict[str, Any]]) -> bool:
    """Call the kernels that torch's AdamW and Adam call with `fused=True` on the CPU. False, with
    nothing changed, where they have more to do than that: in the first step, which makes the
    state, for tensors of several kinds, and for what is set to be decided on the device."""
    if type(optimizer) not in _ADAM or hasattr(optimizer, "found_inf"):
        return False
    calls = []
    for group in groups:
        tensors = _tensors(optimizer.state, group)
        if tensors is None:
            return False
        calls.append((group, tensors))
    with torch.no_grad():
        for group, (weights, gradients, means, squares, steps) in calls:
            torch._foreach_add_(steps, 1)
            decoupled = group["decoupled_weight_decay"]
            (torch._fused_adamw_ if decoupled else torch._fused_adam_)(
                weights,
                gradients,
                means,
                squares,
                [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=group["maximize"],
            )
    return True


def _tensors(state: Any, group: dict[str, Any]) -> tuple[list[Tensor], ...] | None:
    """Weights, gradients, means, means of squares and steps, where these can be updated at once."""
    if not group["fused"] or type(group["lr"]) is not float or any(map(group.get, _UNUSUAL)):
        return None
    weights = [weight for weight in group["params"] if weight.grad is not None]
    gradients = [weight.grad for weight in weights]
    of_weights = {(type(weight), weight.dtype, weight.device.type) for weight in weights}
    if len(of_weights) != 1 or {gradient.layout for gradient in gradients} != {torch.strided}:
        return None
    ((kind, dtype, device),) = of_weights
    if kind is not nn.Parameter or device != "cpu" or not dtype.is_floating_point:
        return None
    states = [state[weight] for weight in weights]
    if not all(states):
        return None
    kept = [[of[name] for of in states] for name in ("exp_avg", "exp_avg_sq", "step")]
    return weights, gradients, *kept


_BY_ELEMENT = (*_ADAM, torch.optim.SGD)
"""Optimizers that update each element by itself, whatever group it is in."""


def _joined(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Its groups; one of all where they differ in nothing, as a Trainer's two without decay, since
    each takes launches of its own."""
    groups = optimizer.param_groups
    first = groups[0]
    if len(groups) == 1 or type(first["lr"]) is not float or type(optimizer) not in _BY_ELEMENT:
        return groups
    settings = {**first, "params": None}
    if any({**group, "params": None} != settings for group in groups[1:]):
        return groups
    return [{**first, "params": [p for group in groups for p in group["params"]]}]


def draws_nothing(optimizer: Optimizer) -> bool:
    """Return True for an optimizer of torch's own, without hooks: none of them draws random
    numbers."""
    kind: Any = type(optimizer)
    return _is_torchs(kind) and _has_plain_step(optimizer)


@functools.cache
def _is_torchs(kind: Any) -> bool:
    names = kind.__module__, getattr(kind.step, "__module__", "")
    return all(name.startswith("torch.optim.") for name in names)


def _has_plain_step(optimizer: Optimizer) -> bool:
    """Return True if torch's profiler range is all that wraps the `step` of the optimizer's class:
    no hook and no function of a user's. A schedule of torch's may wrap it once it has noted a
    step."""
    step, own = getattr(type(optimizer), "step", None), vars(optimizer).get("step")
    if _PROFILED_STEP is None or getattr(step, "__code__", None) is not _PROFILED_STEP:
        return False
    if own is not None and not (
        getattr(own, "_wrapped_by_lr_sched", False)
        and own.__wrapped__ is step
        and getattr(optimizer, "_opt_called", False)  # its only note
    ):
        return False
    return not (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or hooks._global_optimizer_pre_hooks
        or hooks._global_optimizer_post_hooks
    )

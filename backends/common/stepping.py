"""Backward and update: loss scaling, clipping, and no step on what is not finite."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import graph

from ...kernel.contract import Outcome
from .accelerators import facts_of
from .optimizer_step import take_step

_NARROW = {torch.bfloat16, torch.float16}


class LossScale:
    """Dynamic loss scaling on the device, without waiting for it.

    Micikevicius et al., https://arxiv.org/abs/1710.03740: halve on overflow, double after
    `growth_interval` good steps.
    """

    growth_interval = 2000

    def __init__(self, device: torch.device, initial: float = 2.0**16) -> None:
        self.scale = torch.full((), initial, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def unscale(self, grads: Sequence[Tensor]) -> None:
        torch._foreach_mul_(list(grads), self.scale.reciprocal())

    def update(self, overflow: Tensor) -> None:
        torch._amp_update_scale_(
            self.scale, self.good_steps, overflow, 2.0, 0.5, self.growth_interval
        )


_run_backward = getattr(graph, "_engine_run_backward", None)
"""The function that `torch.autograd.backward` calls in the end."""


def scaled(weight: Tensor, loss_scale: LossScale | None) -> Tensor:
    """Return the weight of a loss, multiplied by the loss scale if there is one."""
    return weight if loss_scale is None else weight * loss_scale.scale


def backward(loss: Tensor, weight: Tensor, loss_scale: LossScale | None = None) -> None:
    """Add the gradient of `weight * loss`, multiplied by the loss scale if there is one. Both are
    of one shape and dtype."""
    weight = scaled(weight, loss_scale)
    # it starts with the weight: a product would be two operations more
    if type(loss) is Tensor and _run_backward is not None:
        # torch would first make sure of both shapes, which takes as long as a layer of a small one
        _run_backward(
            (loss,), (weight,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    else:
        torch.autograd.backward(loss, weight)


def update(
    optimizer: torch.optim.Optimizer,
    parameters: Collection[nn.Parameter],
    max_norm: float | None,
    loss_scale: LossScale | None = None,
    max_value: float | None = None,
    before_clip: Callable[[], None] | None = None,
) -> Outcome:
    """The whole of `Engine.update` where this rank holds the whole gradient of everything.
    `before_clip` is called once gradients are unscaled."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if loss_scale is not None:
        loss_scale.unscale(grads)
    if before_clip is not None:
        before_clip()
    norm = global_norm(grads)
    outcome = step_if_finite(optimizer, grads, norm, max_norm, loss_scale, max_value)
    forget_gradients(parameters)
    return outcome


def forget_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Clear all gradients, also those of parameters that the optimizer lacks and `zero_grad` would
    skip."""
    for parameter in parameters:
        parameter.grad = None


def global_norm(grads: Sequence[Tensor]) -> Tensor:
    """L2 norm over all tensors, 0-d float32 on their device; NaN or infinite if any element is."""
    if not grads:
        return torch.zeros(())
    dtypes = {grad.dtype for grad in grads}
    wide = None
    if dtypes & _NARROW:  # a norm in their 16 bits would have but 8 or 11 that count
        wide = functools.reduce(torch.promote_types, dtypes, torch.float32)
    norms = torch.stack(torch._foreach_norm(list(grads), 2, wide))
    return cast(Tensor, torch.linalg.vector_norm(norms).float())


def limit_values(grads: Iterable[Tensor], limit: float) -> None:
    """Clamp each element to [-limit, limit], in place; real and imaginary parts on their own."""
    real = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
    torch._foreach_clamp_min_(real, -limit)
    torch._foreach_clamp_max_(real, limit)


def step_if_finite(
    optimizer: torch.optim.Optimizer,
    grads: Sequence[Tensor],
    norm: Tensor,
    max_norm: float | None,
    loss_scale: LossScale | None = None,
    max_value: float | None = None,
) -> Outcome:
    """Clip to `max_norm`, then each element to `max_value`, and step unless `norm` is not finite.
    The gradients are kept.

    `norm` must be equal on all ranks, since it decides. On the CPU it is read at once; on an
    accelerator an optimizer that supports `found_inf` decides on the device, and the answer is
    fetched after the queued work.
    """
    if norm.device.type != "cpu":
        return _step_on_device(optimizer, grads, norm, max_norm, loss_scale, max_value)
    value = norm.item()
    finite = math.isfinite(value)
    if finite:
        if max_norm is not None and value > max_norm:
            torch._foreach_mul_(list(grads), max_norm / (value + 1e-6))
        if max_value is not None:
            limit_values(grads, max_value)
        take_step(optimizer)
    if loss_scale is not None:
        loss_scale.update(torch.full((), float(not finite)))
    return Outcome(norm, _yes if finite else _no)


def _yes() -> bool:
    return True


def _no() -> bool:
    return False


def _step_on_device(
    optimizer: torch.optim.Optimizer,
    grads: Sequence[Tensor],
    norm: Tensor,
    max_norm: float | None,
    loss_scale: LossScale | None,
    max_value: float | None,
) -> Outcome:
    finite = torch.isfinite(norm)
    overflow = (~finite).float()
    if max_norm is not None:
        torch._foreach_mul_(list(grads), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    if max_value is not None:
        limit_values(grads, max_value)
    applied = fetch_flag(finite)
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # the fused kernels skip the update where `found_inf` is set, step count included
        device_optimizer = cast(Any, optimizer)
        device_optimizer.grad_scale, device_optimizer.found_inf = None, overflow
        take_step(optimizer)
        del device_optimizer.grad_scale, device_optimizer.found_inf
    elif applied():  # this optimizer can only be held back from the host
        take_step(optimizer)
    if loss_scale is not None:
        loss_scale.update(overflow)
    return Outcome(norm, applied)


def fetch_flag(flag: Tensor) -> Callable[[], bool]:
    """Start to copy a 0-d bool from an accelerator; the returned function waits for the copy only,
    not for work queued after it. Without streams it waits for all.
    """
    if not facts_of(flag.device.type).streams:
        return lambda: bool(flag)
    host = torch.empty((), dtype=torch.bool, pin_memory=True)
    host.copy_(flag, non_blocking=True)
    copied = torch.Event(flag.device.type)
    copied.record()

    def wait() -> bool:
        copied.synchronize()
        return bool(host)

    return wait

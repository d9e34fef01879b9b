"""Chooses how an optimizer updates sharded parameters: by parts, by tensors, or all at once."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import nn

from ...kernel.plan import Plan
from ..common import models
from ..common.update_random import UpdateRandom, of_device
from ..process_group.peers import Peers
from . import dtensor, sharding
from .kind_step import StepByKind
from .owner_step import OwnerStep, kept_of

__all__ = ["choose", "gathers"]

_LOG = logging.getLogger(__name__)


def choose(
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    module: nn.Module,
    device: torch.device,
    peers: Peers,
) -> tuple[torch.optim.Optimizer, UpdateRandom]:
    """Return the optimizer that steps `optimizer` over the parameters of `module`, and the random
    numbers of its updates. Several optimizers in one are each stepped in their own way.
    """
    how = sharding.options_of(plan).optimizer_step
    draws = UpdateRandom(plan.seed, of_device(device), peers.first)
    several: Any = optimizer
    if len(kinds := models.kinds_of(several)) == 1:
        return _choose(kinds[0], how, module, device, draws), draws
    for name, kind in several.optimizers.items():
        several.step_by[name] = _choose(kind, how, module, device, draws).step
    return cast(torch.optim.Optimizer, several), draws


def gathers(stepper: Any) -> bool:
    """Return True if an update gathers tensors from other ranks, so that it may fail midway."""
    steps = getattr(stepper, "step_by", {"": stepper.step}).values()
    owners = (getattr(step, "__self__", None) for step in steps)
    return any(isinstance(owner, OwnerStep | dtensor.WholeStep) for owner in owners)


def _choose(
    optimizer: torch.optim.Optimizer,
    how: str,
    module: nn.Module,
    device: torch.device,
    draws: UpdateRandom,
) -> torch.optim.Optimizer:
    if how == "auto" and dtensor.steps_parts(optimizer):
        how = "parts"
    elif how == "auto" and dtensor.steps_tensors(optimizer):
        how = "tensors"
    elif how == "auto":
        _LOG.warning(
            "%s is not known to treat each tensor by itself: every rank gathers the whole "
            "model, gradients and state for each update. Where it does, set "
            "backend.optimizer_step=tensors; where each element, parts",
            type(optimizer).__name__,
        )
    if how == "parts":
        by_kind = StepByKind(optimizer, draws)
        return cast(torch.optim.Optimizer, by_kind) if by_kind.is_needed else optimizer
    sharded_once = all(map(dtensor.is_sharded_once, module.parameters()))
    if how == "tensors" and kept_of(optimizer) is not None and sharded_once:
        return cast(torch.optim.Optimizer, OwnerStep(optimizer, device))
    stepper = dtensor.WholeStep(optimizer, device, apart=how == "tensors")
    return cast(torch.optim.Optimizer, stepper)

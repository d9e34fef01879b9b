"""Chooses how an optimizer updates what is cut over ranks: by parts, by tensors, or all at once."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import nn

from ..common import models
from . import dtensor
from .owner_step import OwnerStep, kept_of

__all__ = ["choose"]

_LOG = logging.getLogger(__name__)


def choose(
    optimizer: torch.optim.Optimizer, how: str, module: nn.Module, device: torch.device
) -> torch.optim.Optimizer:
    """Return the optimizer that steps `optimizer` over the parameters of `module`. Several in one
    are each stepped in their own way. `how`: see `ShardingOptions.optimizer_step`.
    """
    several: Any = optimizer
    if len(kinds := models.kinds_of(several)) == 1:
        return _choose(kinds[0], how, module, device)
    for name, kind in several.optimizers.items():
        several.step_by[name] = _choose(kind, how, module, device).step
    return cast(torch.optim.Optimizer, several)


def _choose(
    optimizer: torch.optim.Optimizer, how: str, module: nn.Module, device: torch.device
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
        by_kind = dtensor.StepByKind(optimizer)
        several = len(by_kind.meshes) > 1
        return cast(torch.optim.Optimizer, by_kind) if several else optimizer
    cut_once = all(map(dtensor.is_cut_once, module.parameters()))
    if how == "tensors" and kept_of(optimizer) is not None and cut_once:
        return cast(torch.optim.Optimizer, OwnerStep(optimizer, device))
    stepper = dtensor.WholeStep(optimizer, device, apart=how == "tensors")
    return cast(torch.optim.Optimizer, stepper)

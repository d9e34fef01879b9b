"""Two ways to one loss, before the first update: whole and cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ...kernel.plan import Plan

__all__ = ["alike", "evaluating"]

_TOLERANCE = {torch.float32: 1e-4}
_LOW_TOLERANCE = 5e-3
"""Relative, of a loss that is computed in bfloat16 or float16: roundings of 2**-8 average out over
positions, and a target that is lost at an end of a part is one of 64."""


def alike(seen: float, expected: float, plan: Plan) -> bool:
    """True if the losses differ by no more than roundings, or are no numbers both."""
    tolerance = _TOLERANCE.get(plan.precision.compute, _LOW_TOLERANCE)
    return not abs(seen - expected) > tolerance * abs(expected)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """In evaluation mode, which draws no random numbers."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training

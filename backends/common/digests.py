"""Digests of tensors, by which their bits are compared without a copy of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["as_real", "digests_of"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests_of(tensors: Sequence[Tensor | None]) -> Tensor:
    """Return the bits of each tensor added up as integers, int64: equal for equal bits, in any
    order.
    """
    sums = [
        torch.zeros((), dtype=torch.int64)
        if tensor is None
        else tensor.detach().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
        if tensor.element_size() in _INTEGERS
        else as_real(tensor.detach()).view(torch.int64).sum(dtype=torch.int64)
        for tensor in tensors
    ]
    device = next((each.device for each in sums if each.device.type != "cpu"), None)
    return torch.stack([each if device is None else each.to(device) for each in sums])


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers; any other as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor

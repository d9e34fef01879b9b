"""Tensors as bytes in host memory, without a copy."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

__all__ = ["host_bytes", "memory", "num_bytes"]


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, not a copy; valid as long as the tensor is."""
    if not tensor.numel():
        return memoryview(b"")
    if not tensor.is_cpu or not tensor.is_contiguous():
        raise ValueError(f"needs a contiguous host tensor, not one on {tensor.device}")
    raw = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(raw).cast("B")


def host_bytes(size: int) -> Tensor:
    """New host memory, uint8, whatever the default device is, which `torch.empty` would follow."""
    return torch.frombuffer(bytearray(max(size, 1)), dtype=torch.uint8)[:size]


def num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """The size of a tensor's data."""
    return math.prod(shape) * dtype.itemsize

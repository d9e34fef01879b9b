"""Questions about CUDA that the arguments of HF ask. No other module names `torch.cuda`: the others
ask `torch.accelerator`."""

from __future__ import annotations

import torch

__all__ = ["has_bf16", "has_cuda", "has_tf32"]


def has_cuda() -> bool:
    """Return True if a CUDA device can be used."""
    return torch.cuda.is_available()


def has_bf16() -> bool:
    """Return True if there is a CUDA device that computes in bfloat16."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def has_tf32() -> bool:
    """Return True if there is a CUDA device that computes in TF32, of the Ampere generation or
    newer."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8

"""The peak speed of this device: a short matrix product, timed on the device itself.

A data sheet's figure is not known for most devices, and a processor that is shared or throttled
does not reach it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

__all__ = ["Peak", "measure_peak"]

LONG_ENOUGH_SECONDS = 0.004
LARGEST_SIDE = 4096
PATIENCE_SECONDS = 0.3


@dataclass(frozen=True)
class Peak:
    """Operations per second of all ranks, and how they were measured."""

    flops: float
    device: str
    dtype: str
    ranks: int

    def __str__(self) -> str:
        each = f"{self.ranks} x " if self.ranks > 1 else ""
        figure = format_flops(self.flops / self.ranks)
        return f"{each}{figure} ({self.dtype} matrix product measured on this {self.device})"


def format_flops(flops: float) -> str:
    """Format a speed: `142 GFLOP/s`."""
    unit, scale = ("TFLOP/s", 1e12) if flops >= 1e12 else ("GFLOP/s", 1e9)
    return f"{flops / scale:.3g} {unit}"


def measure_peak(device: torch.device, dtype: torch.dtype, ranks: int) -> Peak | None:
    """Measure the best of a few products, in well under a second; draws no random numbers. None if
    products cannot be timed (on a device that compiles first)."""
    if device.type not in ("cpu", "cuda", "xpu"):
        return None
    flops, side = 0.0, 512
    matrix = _matrix(side, device, dtype)
    _time_product(matrix)  # the first product also wakes threads and loads kernels
    deadline = time.perf_counter() + PATIENCE_SECONDS
    while time.perf_counter() < deadline:
        seconds = _time_product(matrix)
        flops = max(flops, 2.0 * side**3 / seconds)
        if seconds < LONG_ENOUGH_SECONDS and side < LARGEST_SIDE:
            side *= 2
            matrix = _matrix(side, device, dtype)
            _time_product(matrix)
    return Peak(flops * ranks, _name(device), str(dtype).removeprefix("torch."), ranks)


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    return str(torch.get_device_module(device).get_device_name(device))


def _matrix(side: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(side * side, device=device) % 7 - 3
    return (values / 8).to(dtype).view(side, side)


def _time_product(matrix: torch.Tensor) -> float:
    start = time.perf_counter()
    product = matrix @ matrix
    float(product[0, 0])  # waits for the device
    return time.perf_counter() - start

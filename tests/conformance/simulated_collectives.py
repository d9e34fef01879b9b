"""Collectives of the simulated accelerator: ranks, each with a device of its own, add up tensors.

They are those of gloo, on the memory of the device. `register` makes them the backend `simulated`
of `torch.distributed`. It takes what NCCL does: contiguous tensors of the device, of these types.
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..data.nested import map_leaves
from .simulated_device import DEVICE, device, is_on_device, on_host

__all__ = ["NAME", "register"]

NAME = "simulated"
_DTYPES = {
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
_Backend: Any = dist.distributed_c10d.C10DBackend  # type: ignore[attr-defined]


class SimulatedCollectives(_Backend):  # type: ignore[misc]
    """A backend of `torch.distributed`. `device.replaced` lets its sums misbehave, by the name
    `allreduce`."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return NAME

    def _call(self, name: str, *tensors: Any, options: Any) -> Any:
        act: Callable[..., Any] = getattr(self._gloo, name)
        given = map_leaves(_taken, tensors)
        if (replaced := device.replaced.get(name)) is not None:
            return replaced(act, *given, options)
        return act(*given, options)

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self._call("allreduce", tensors, options=options)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        return self._call("broadcast", tensors, options=options)

    def allgather(self, outputs: Any, inputs: Any, options: Any) -> Any:
        return self._call("allgather", outputs, inputs, options=options)

    def all_gather_single(self, output: Any, part: Any, options: Any) -> Any:
        return self._call("all_gather_single", output, part, options=options)


def _taken(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not (is_on_device(value) and value.dtype in _DTYPES and value.is_contiguous()):
        raise TypeError(
            f"the simulated device's collectives take no tensor of {value.device}, {value.dtype}, "
            f"shape {tuple(value.shape)} and strides {value.stride()}"
        )
    return on_host(value)


@cache
def register() -> None:
    """Add the backend to this process."""
    dist.Backend.register_backend(NAME, SimulatedCollectives, devices=[DEVICE])

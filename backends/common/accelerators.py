"""Facts about the accelerators that torch knows: a row for each kind of device.

What torch answers itself (how many devices, their memory, their random state) is asked of
`torch.accelerator` and of the device's module, `torch.get_device_module`. A row holds the rest. A
package adds the row of its own device by the entry-point group `drivetrain.accelerators`: the name
of the device type, and a `module:attribute` that is an `Accelerator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch

from ...kernel.errors import BackendUnavailable

__all__ = ["ENTRY_POINT_GROUP", "Accelerator", "Found", "facts_of", "find"]

ENTRY_POINT_GROUP = "drivetrain.accelerators"


@dataclass(frozen=True)
class Accelerator:
    """Facts about one kind of device, the host among them."""

    precisions: frozenset[str] = frozenset({"fp32", "bf16", "fp16"})
    """The precisions in which it trains; `fp16` needs torch's operations for loss scaling."""
    streams: bool = True
    """It has streams, events and page-locked host memory: batches are copied ahead, and the flag of
    a step is fetched without waiting for later work. False: each copy is waited for."""
    float64: bool = True
    """It has float64. False: what is added up in float64 lies on the host."""
    compile: bool = False
    """`torch.compile` works on it."""
    collectives: str = ""
    """The backend of `torch.distributed` for its tensors, such as `nccl`; empty: each process uses
    a device alone, by the driver `accelerator`."""
    float8: tuple[int, int] | None = None
    """The compute capability from which on it multiplies in float8; None: none does."""

    @property
    def sums_on(self) -> torch.device | None:
        """The device for float64, where this one has none. None: this one."""
        return None if self.float64 else torch.device("cpu")


_ROWS = {
    "cpu": Accelerator(streams=False, compile=True, collectives="gloo"),
    "cuda": Accelerator(compile=True, collectives="nccl", float8=(8, 9)),
    "xpu": Accelerator(compile=True, collectives="xccl"),
    "mps": Accelerator(precisions=frozenset({"fp32", "bf16"}), streams=False, float64=False),
    "npu": Accelerator(collectives="hccl"),
    "tpu": Accelerator(precisions=frozenset({"fp32", "bf16"}), streams=False, float64=False),
}


@cache
def facts_of(device_type: str) -> Accelerator:
    """Return the row of a type of device, such as `mps`; a package's own row first.

    Raises `BackendUnavailable` for a row that cannot be imported. A device without a row is taken
    to be able to do the least: float32, and copies that are waited for.
    """
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == device_type:
            try:
                row: Accelerator = entry.load()
            except (ImportError, AttributeError) as error:
                raise BackendUnavailable(
                    f"the facts about the device {device_type!r} ({entry.value}) cannot be "
                    f"imported: {error}. Reinstall the package that provides them"
                ) from error
            return row
    return _ROWS.get(device_type, Accelerator(precisions=frozenset({"fp32"}), streams=False))


@dataclass(frozen=True)
class Found:
    """The accelerators of this machine that torch can use, all of one type."""

    type: str = ""
    """Such as `cuda`; empty if this build of torch is for none."""
    count: int = 0

    @property
    def names(self) -> Sequence[str]:
        """The product's name of each device."""
        return [getattr(each, "name", self.type) for each in self._properties()]

    @property
    def memory_bytes(self) -> int:
        """Bytes of all devices together; 0 if torch does not know."""
        return sum(getattr(each, "total_memory", 0) for each in self._properties())

    def _properties(self) -> list[Any]:
        if not self.count:
            return []
        read = getattr(torch.get_device_module(self.type), "get_device_properties", lambda _: None)
        return [read(index) for index in range(self.count)]


def find() -> Found:
    """Look for accelerators. It starts none, so this process can be forked afterwards."""
    built = torch.accelerator.current_accelerator()
    if built is None:
        return Found()
    try:
        return Found(built.type, torch.accelerator.device_count())
    except RuntimeError:  # torch has no module for it
        return Found(built.type)

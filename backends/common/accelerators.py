"""Facts about the accelerators that torch knows: a row for each kind of device.

What torch answers itself (how many devices, their memory, their random state) is asked of
`torch.accelerator` and of the device's module, `torch.get_device_module`. A row holds the rest. A
package adds the row of its own device by the entry-point group `drivetrain.accelerators`: the name
of the device type, and a `module:attribute` that is an `Accelerator`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

from ...kernel.errors import BackendUnavailable

__all__ = ["ENTRY_POINT_GROUP", "Accelerator", "facts_of"]

ENTRY_POINT_GROUP = "drivetrain.accelerators"


@dataclass(frozen=True)
class Accelerator:
    """Facts about one kind of device."""

    precisions: frozenset[str] = frozenset({"fp32", "bf16", "fp16"})
    """The precisions in which it trains; `fp16` needs torch's operations for loss scaling."""
    streams: bool = True
    """It has streams, events and page-locked host memory: batches are copied ahead, and the flag of
    a step is fetched without waiting for later work. False: each copy is waited for."""
    float64: bool = True
    """It has float64. False: an evaluation adds up its sums on the host."""
    compile: bool = False
    """`torch.compile` works on it."""


_ROWS = {
    "cuda": Accelerator(compile=True),
    "xpu": Accelerator(compile=True),
    "mps": Accelerator(precisions=frozenset({"fp32", "bf16"}), streams=False, float64=False),
    "npu": Accelerator(),
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

"""Speeds of accelerators, by their vendors' data sheets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..data.small_files import read_table
from ..kernel.errors import SettingError

__all__ = ["DEVICES", "Device", "find_device"]


@dataclass(frozen=True)
class Device:
    """An accelerator, and its links in a machine of several. Speeds are the highest ones."""

    name: str
    source: str
    """The origin of the figures."""
    memory_bytes: float
    memory_bytes_per_second: float
    flops_per_second: Mapping[str, float]
    """Speed of matrix products, without sparsity, by dtype. `tensorfloat32`: that of float32 after
    `torch.set_float32_matmul_precision("high")`."""
    ranks_per_machine: int
    machine_bytes_per_second: float
    """Speed at which one device sends to the others of its machine."""
    network_bytes_per_second: float
    """Speed at which one device sends to other machines."""
    operation_seconds: float = 0.0
    """Time that an operation takes at least."""
    message_seconds: float = 0.0
    """Time that a message takes, besides that of its bytes."""

    def __post_init__(self) -> None:
        for key in _TEXTS:
            if not isinstance(text := getattr(self, key), str):
                raise SettingError(f"{key} of a device is {text!r:.80}; it must be a text")
        numbers = {key: value for key, value in vars(self).items() if key not in _TEXTS}
        speeds = numbers.pop("flops_per_second")
        if not isinstance(speeds, Mapping) or "float32" not in speeds:
            raise SettingError(
                f"flops_per_second of the device {self.name!r} is {speeds!r}; it must give FLOPs "
                'per second by dtype, at least those of float32: {"float32": 6.7e13}'
            )
        numbers |= {f"flops_per_second.{dtype}": value for dtype, value in speeds.items()}
        for key, value in numbers.items():
            whole = key == "ranks_per_machine"
            is_number = isinstance(value, int if whole else int | float) and value is not True
            may_be_none = key in _LATENCIES
            if not is_number or not (0 < value < math.inf or (may_be_none and value == 0)):
                what = "a whole number" if whole else "a number"
                least = "of 0 or more" if may_be_none else "above 0"
                raise SettingError(
                    f"{key} of the device {self.name!r} is {value!r}; it must be {what} {least}"
                )

    def in_machines_of(self, world_size: int) -> Device:
        """Return the device in machines that so many ranks fill: the largest number in each."""
        sizes = range(1, min(world_size, self.ranks_per_machine) + 1)
        number = max(size for size in sizes if world_size % size == 0)
        return dataclasses.replace(self, ranks_per_machine=number)

    def flops_of(self, dtype: torch.dtype) -> float:
        """Return the FLOPs per second of matrix products of a dtype."""
        name = str(dtype).removeprefix("torch.")
        if name == "float32" and torch.get_float32_matmul_precision() != "highest":
            name = "tensorfloat32"
        return self.flops_per_second.get(name, self.flops_per_second["float32"])


_TEXTS = ("name", "source")
_LATENCIES = ("operation_seconds", "message_seconds")
_DGX_H100 = "https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html"
_H100 = Device(
    name="h100",
    source=f"https://www.nvidia.com/en-us/data-center/h100/ (SXM), {_DGX_H100}",
    memory_bytes=80e9,
    memory_bytes_per_second=3.35e12,
    flops_per_second={
        "float64": 67e12,
        "float32": 67e12,
        "tensorfloat32": 494.7e12,
        "bfloat16": 989.4e12,
        "float16": 989.4e12,
        "float8_e4m3fn": 1978.9e12,
        "float8_e5m2": 1978.9e12,
    },
    ranks_per_machine=8,
    machine_bytes_per_second=450e9,
    network_bytes_per_second=50e9,
)
_H200 = dataclasses.replace(
    _H100,
    name="h200",
    source=f"https://www.nvidia.com/en-us/data-center/h200/ (SXM), {_DGX_H100}",
    memory_bytes=141e9,
    memory_bytes_per_second=4.8e12,
)
_A100 = Device(
    name="a100",
    source="https://www.nvidia.com/en-us/data-center/a100/ (80GB SXM), "
    "https://docs.nvidia.com/dgx/dgxa100-user-guide/introduction-to-dgxa100.html",
    memory_bytes=80e9,
    memory_bytes_per_second=2.039e12,
    flops_per_second={
        "float64": 19.5e12,
        "float32": 19.5e12,
        "tensorfloat32": 156e12,
        "bfloat16": 312e12,
        "float16": 312e12,
    },
    ranks_per_machine=8,
    machine_bytes_per_second=300e9,
    network_bytes_per_second=25e9,
)
DEVICES = {device.name: device for device in (_A100, _H100, _H200)}
"""Devices by name. The speed within a machine is half of what a data sheet gives for both ways."""


def find_device(name: str) -> Device:
    """Return the device of that name, or the one in a file of JSON, YAML or TOML that has the
    fields of `Device`. Raises `SettingError`."""
    if name in DEVICES:
        return DEVICES[name]
    if not Path(name).suffix:
        raise SettingError(
            f"device {name!r} is not known: it may be {', '.join(DEVICES)}, or the path of a file "
            f"with the fields of another device ({', '.join(_NEEDED)}), such as my-device.json"
        )
    try:
        table: Any = read_table(Path(name))
    except (OSError, ValueError) as error:
        raise SettingError(f"device {name!r} cannot be read: {error}") from error
    given = {*table} if isinstance(table, Mapping) else set()
    wrong = [f"{key} is missing" for key in _NEEDED if key not in given]
    wrong += [f"{key} is unknown" for key in sorted(given - {*_NEEDED, *_LATENCIES})]
    if wrong:
        raise SettingError(f"device {name!r} must be a table of {len(_NEEDED)}: {', '.join(wrong)}")
    return Device(**table)


_NEEDED = [field.name for field in dataclasses.fields(Device) if field.name not in _LATENCIES]

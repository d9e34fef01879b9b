"""Speeds of accelerators, by their vendors' data sheets."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    overlap: float = 1.0
    """Part of the time of a message in which computing continues at full speed, from 0 to 1: 0
    where the processor that computes also sends."""
    collective_efficiency: Mapping[str, float] = field(default_factory=dict)
    """Part of the speed of links that a collective reaches, by its name in `torch.distributed`,
    such as `all_gather`; others reach all of it."""
    new_byte_seconds: float = 0.0
    """Time that a byte of a large new tensor takes, where each asks the system for its memory: on
    the host."""

    def __post_init__(self) -> None:
        for key in _TEXTS:
            if not isinstance(text := getattr(self, key), str):
                raise SettingError(f"{key} of a device is {text!r:.80}; it must be a text")
        numbers = {key: value for key, value in vars(self).items() if key not in _TEXTS}
        for key, known in _NAMES.items():
            table = numbers.pop(key)
            if not isinstance(table, Mapping) or not {*table} <= {*known}:
                raise SettingError(
                    f"{key} of the device {self.name!r} is {table!r}; it must be a table, such as "
                    f'{{"{known[0]}": 0.5}}. Names are {", ".join(known)}'
                )
            numbers |= {f"{key}.{name}": value for name, value in table.items()}
        if "float32" not in self.flops_per_second:
            raise SettingError(
                f"flops_per_second of the device {self.name!r} is {self.flops_per_second!r}; it "
                "must give at least those of float32"
            )
        for key, value in numbers.items():
            whole = key == "ranks_per_machine"
            is_number = isinstance(value, int if whole else int | float)
            least, most, bounds = _BOUNDS.get(key, (math.ulp(0.0), sys.float_info.max, "above 0"))
            if not is_number or isinstance(value, bool) or not least <= value <= most:
                what = "a whole number" if whole else "a number"
                raise SettingError(
                    f"{key} of the device {self.name!r} is {value!r}; it must be {what} {bounds}"
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

    def efficiency_of(self, collective: str) -> float:
        """Return the part of the speed of links that a collective reaches."""
        name = collective.replace("_", "")
        parts = self.collective_efficiency.items()
        return next((part for key, part in parts if key.replace("_", "") in name), 1.0)


_TEXTS = ("name", "source")
_NAMES = {
    "flops_per_second": (
        "float32",
        "tensorfloat32",
        "bfloat16",
        "float16",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "int8",
    ),
    "collective_efficiency": (
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "all_reduce",
        "broadcast",
    ),
}
"""The names that tables of a device may have."""
_BOUNDS = {
    **dict.fromkeys(
        ("operation_seconds", "message_seconds", "new_byte_seconds"),
        (0.0, sys.float_info.max, "of 0 or more"),
    ),
    "overlap": (0.0, 1.0, "from 0 to 1"),
}
"""The least and the largest value of fields, in words, too; others are above 0."""
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
    wrong += [f"{key} is unknown" for key in sorted(given - {*_FIELDS})]
    if wrong:
        raise SettingError(f"device {name!r} must be a table of {len(_NEEDED)}: {', '.join(wrong)}")
    return Device(**table)


_FIELDS = {each.name: each for each in dataclasses.fields(Device)}
_MISSING = (dataclasses.MISSING, dataclasses.MISSING)
_NEEDED = [
    name for name, each in _FIELDS.items() if (each.default, each.default_factory) == _MISSING
]
"""The fields that a table must have."""

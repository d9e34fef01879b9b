"""A file that describes the machine at hand, for `drivetrain plan`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from ...checkpoint.storage.local import replace_text
from ...kernel.errors import SettingError
from ...planning.calibrate import calibrate, num_local_ranks
from ...planning.devices import Device
from ...registry import find_driver

__all__ = ["measure_device"]


def measure_device(path: Path, world_size: int) -> str:
    """Measure this machine with as many of the ranks as it can hold, and write what `--device`
    takes to a new file of JSON. Return a text on it.

    Raises `SettingError` if there is such a file, and `DrivetrainError` if the machine cannot be
    measured.
    """
    if path.suffix != ".json":
        raise SettingError(f"{str(path)!r} must end with .json, which --device reads")
    if path.exists():
        raise SettingError(f"{path} exists: give another name, or take it as it is by --device")
    if not path.parent.is_dir():
        raise SettingError(f"{path} cannot be written: there is no folder {path.parent}")
    num_ranks = num_local_ranks(world_size)
    memory_bytes = find_driver("auto").probe().memory_bytes
    device = calibrate(path.stem, num_ranks, memory_bytes)
    replace_text(path, json.dumps(dataclasses.asdict(device), indent=1) + "\n")
    return f"{path}: {_text(device, world_size)}"


def _text(device: Device, world_size: int) -> str:
    flops = ", ".join(f"{each / 1e9:,.0f} {name}" for name, each in device.flops_per_second.items())
    text = (
        f"each of {device.ranks_per_machine} ranks has GFLOP/s {flops}, reads and writes "
        f"{device.memory_bytes_per_second / 1e9:,.1f} GB/s, and sends "
        f"{device.machine_bytes_per_second / 1e9:,.1f} GB/s"
    )
    if world_size > device.ranks_per_machine:
        text += (
            ". The other ranks are on other machines, and the network between them is not "
            "measured: set network_bytes_per_second in the file, and give it by --device"
        )
    return text

"""Devices of the table, and those that a file describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.kernel.errors import SettingError
from drivetrain.planning.devices import DEVICES, find_device

MINE: dict[str, Any] = {
    "name": "mine",
    "source": "measured",
    "memory_bytes": 24e9,
    "memory_bytes_per_second": 1e12,
    "flops_per_second": {"float32": 1e13, "bfloat16": 1e14},
    "ranks_per_machine": 2,
    "machine_bytes_per_second": 1e10,
    "network_bytes_per_second": 1e9,
}


def file(folder: Path, **changes: Any) -> str:
    path = folder / "device.json"
    path.write_text(json.dumps({**MINE, **changes}))
    return str(path)


@pytest.mark.parametrize("name", DEVICES)
def test_each_device_has_its_source(name: str) -> None:
    device = find_device(name)
    assert device.source.startswith("https://")
    assert device.flops_of(torch.bfloat16) > device.flops_of(torch.float32)
    assert device.machine_bytes_per_second > device.network_bytes_per_second


def test_products_of_float32_may_be_less_precise() -> None:
    device, before = find_device("h100"), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        slow = device.flops_of(torch.float32)
        torch.set_float32_matmul_precision("high")
        assert device.flops_of(torch.float32) > slow
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("ranks", "in_machine"), [(1, 1), (6, 6), (8, 8), (64, 8), (12, 6), (13, 1)]
)
def test_ranks_fill_their_machines(ranks: int, in_machine: int) -> None:
    assert find_device("h100").in_machines_of(ranks).ranks_per_machine == in_machine


def test_a_file_describes_another_device(tmp_path: Path) -> None:
    device = find_device(file(tmp_path))
    assert (device.name, device.ranks_per_machine) == ("mine", 2)
    assert device.flops_of(torch.bfloat16) == 1e14
    assert device.flops_of(torch.float16) == 1e13  # not given: as float32


def test_a_file_may_have_the_least_time_of_operations_and_messages(tmp_path: Path) -> None:
    assert find_device(file(tmp_path)).operation_seconds == 0
    device = find_device(file(tmp_path, operation_seconds=1e-5, message_seconds=0))
    assert (device.operation_seconds, device.message_seconds) == (1e-5, 0)


def test_a_name_that_is_not_known_is_refused() -> None:
    with pytest.raises(SettingError, match="'h1000' is not known: it may be a100, h100, h200, or"):
        find_device("h1000")
    with pytest.raises(SettingError, match=r"'none\.json' cannot be read: .*No such file"):
        find_device("none.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes": 0}, "memory_bytes of the device 'mine' is 0; it must be a number above"),
        ({"memory_bytes": "24GB"}, "memory_bytes of the device 'mine' is '24GB'"),
        ({"memory_bytes": float("inf")}, "memory_bytes of the device 'mine' is inf"),
        ({"memory_bytes": float("nan")}, "memory_bytes of the device 'mine' is nan"),
        ({"ranks_per_machine": True}, "ranks_per_machine of the device 'mine' is True"),
        ({"ranks_per_machine": 2.5}, "is 2.5; it must be a whole number above 0"),
        ({"source": 1}, "source of a device is 1; it must be a text"),
        ({"flops_per_second": {"bfloat16": 1e14}}, "flops_per_second of the device 'mine' is"),
        ({"flops_per_second": {"float32": -1}}, r"flops_per_second\.float32 of the device"),
        ({"operation_seconds": -1}, "operation_seconds of the device 'mine' is -1; it must be a n"),
        ({"message_seconds": True}, "message_seconds of the device 'mine' is True"),
        ({"overlap": 1.5}, "overlap of the device 'mine' is 1.5; it must be a number from 0 to 1"),
        (
            {"new_byte_seconds": -1},
            "new_byte_seconds of the device 'mine' is -1; it must be a numb",
        ),
        ({"collective_efficiency": 1}, "collective_efficiency of the device 'mine' is 1; it must"),
        ({"collective_efficiency": {"all_gather": 0}}, r"collective_efficiency\.all_gather of the"),
        ({"collective_efficiency": {"gather": 0.5}}, "Names are all_gather, reduce_scatter, all_"),
        ({"flops_per_second": {"float32": 1, "fp16": 1}}, "Names are float32, tensorfloat32, bf"),
        ({"message_seconds": False}, "message_seconds of the device 'mine' is False"),
        ({"memory": 1}, "must be a table of 8: memory is unknown"),
    ],
)
def test_a_figure_that_is_wrong_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        find_device(file(tmp_path, **changes))


def test_a_figure_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text('{"name": "mine"}')
    with pytest.raises(SettingError, match="must be a table of 8: source is missing, memory_bytes"):
        find_device(str(path))
    path.write_text("[1")
    with pytest.raises(SettingError, match="cannot be read"):
        find_device(str(path))

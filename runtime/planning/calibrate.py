"""Measures the speeds of the machine at hand, with ranks that work at the same time."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import (  # type: ignore[attr-defined]
    ProcessExitedException,
    ProcessRaisedException,
    spawn,
)

from ..data.parent import end_with_parent
from ..data.small_files import read_json
from ..kernel.errors import DrivetrainError
from ..trainer.time_accounting import num_cores
from .devices import Device

__all__ = ["calibrate", "num_local_ranks", "speeds_of_ranks"]

_LONG_ENOUGH = 0.02
"""Seconds that what is measured takes at least, unless it is of the largest size."""
_REPEATS = 5
_PRODUCTS = {
    "float64": (torch.float64, "highest"),
    "float32": (torch.float32, "highest"),
    "tensorfloat32": (torch.float32, "high"),
    "bfloat16": (torch.bfloat16, "highest"),
    "float16": (torch.float16, "highest"),
}
"""Products of matrices by name, see `Device.flops_per_second`: dtype, and the precision of products
of float32."""
_TIME_LIMIT = timedelta(minutes=5)


def num_local_ranks(world_size: int) -> int:
    """Return how many of these ranks this machine can hold: one for each accelerator, or for each
    core."""
    here = torch.accelerator.device_count() if torch.accelerator.is_available() else num_cores()
    return min(here, world_size)


def calibrate(name: str, num_ranks: int, memory_bytes: int) -> Device:
    """Return a device with the speeds of this machine, for `num_ranks` ranks that use it together.
    `memory_bytes`: the memory of all its accelerators, or else of the host.

    It takes less than a minute. The network between machines is not measured: its speed is that of
    the link within this one. Raises `DrivetrainError` if a rank ends with an error.
    """
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as folder:
        try:
            spawn(_measure, (num_ranks, folder, os.getpid()), num_ranks)  # type: ignore[no-untyped-call]
        except (ProcessExitedException, ProcessRaisedException) as error:
            reason = str(error).strip().splitlines()[-1]
            raise DrivetrainError(f"this machine cannot be measured: {reason}") from error
        speeds: dict[str, Any] = read_json(Path(folder, "speeds.json"))
    return Device(
        name=name,
        source=f"measured with {num_ranks} ranks, torch {torch.__version__}",
        memory_bytes=memory_bytes / (torch.accelerator.device_count() or num_ranks),
        ranks_per_machine=num_ranks,
        network_bytes_per_second=speeds["machine_bytes_per_second"],
        **speeds,
    )


def _measure(rank: int, num_ranks: int, folder: str, parent: int) -> None:
    """Run a rank that measures. The first writes what it finds."""
    end_with_parent("a process that measures this machine: the one that started it", parent)
    store = dist.FileStore(f"{folder}/store", num_ranks)  # type: ignore[attr-defined]
    dist.init_process_group(store=store, rank=rank, world_size=num_ranks, timeout=_TIME_LIMIT)
    try:
        found = speeds_of_ranks()
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(folder, "speeds.json").write_text(json.dumps(found))


def speeds_of_ranks() -> dict[str, Any]:
    """Return the speeds that the ranks of the process group have while all of them work: fields of
    `Device`. Called by all of them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, num_cores() // size))
    else:
        device = torch.device(accelerator.type, rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
    copied = _copied_per_second(device)
    return {
        "memory_bytes_per_second": copied,
        "flops_per_second": {
            name: flops
            for name, (dtype, precision) in _PRODUCTS.items()
            if (flops := _flops_per_second(dtype, precision, device))
        },
        "machine_bytes_per_second": _sent_per_second(device) if size > 1 else copied,
        "operation_seconds": _operation_seconds(device),
        "message_seconds": _message_seconds(device) if size > 1 else 0.0,
    }


def _flops_per_second(dtype: torch.dtype, precision: str, device: torch.device) -> float:
    """Return the speed of products of square matrices; 0 if the device has none of this dtype."""

    def product(size: int) -> Callable[[], object]:
        one, other = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
        return lambda: one @ other

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        size, seconds = _first_long(product, (2**power for power in range(8, 15)), device)
    except (RuntimeError, TypeError):
        return 0.0
    finally:
        torch.set_float32_matmul_precision(before)
    return 2 * size**3 / seconds


def _copied_per_second(device: torch.device) -> float:
    """Return the bytes that copies read and write in a second."""

    def copy(size: int) -> Callable[[], object]:
        source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
        return lambda: target.copy_(source)

    size, seconds = _first_long(copy, (2**power for power in range(22, 31)), device)
    return 2 * size / seconds


def _sent_per_second(device: torch.device) -> float:
    """Return the bytes that a rank sends in a second in sums over all ranks."""

    def summed(size: int) -> Callable[[], object]:
        values = torch.zeros(size // 4, device=device)
        return lambda: dist.all_reduce(values)

    size, seconds = _first_long(summed, (2**power for power in range(20, 29)), device)
    num_ranks = dist.get_world_size()
    return 2 * (num_ranks - 1) / num_ranks * size / seconds


def _operation_seconds(device: torch.device) -> float:
    values = torch.zeros(8, device=device, requires_grad=True)
    count = 1000

    def many() -> None:
        result = values
        for _ in range(count):
            result = result + 1

    return _seconds(many, device) / count


def _message_seconds(device: torch.device) -> float:
    values, count = torch.zeros(8, device=device), 20

    def many() -> None:
        for _ in range(count):
            dist.all_reduce(values)

    return _seconds(many, device) / count


def _first_long(
    of_size: Callable[[int], Callable[[], object]], sizes: Iterable[int], device: torch.device
) -> tuple[int, float]:
    """Return the first size that takes long enough to be measured, or the last, and its seconds."""
    size, seconds = 0, 0.0
    for size in sizes:
        seconds = _seconds(of_size(size), device)
        if seconds >= _LONG_ENOUGH:
            break
    return size, seconds


def _seconds(act: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that this takes on the slowest rank, while all ranks do it."""
    act()
    taken = []
    for _ in range(_REPEATS):
        dist.barrier()
        start = time.perf_counter()
        act()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        taken.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(taken), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)

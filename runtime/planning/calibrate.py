"""Measures the speeds of the machine at hand, with ranks that work at the same time."""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
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

__all__ = ["calibrate", "num_local_ranks"]

_LONG_ENOUGH = 0.02
"""Seconds that what is measured takes at least, unless it is of the largest size."""
_REPEATS = 5
_TOTAL = 0.4
"""Seconds for which a measurement is repeated."""
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

_Collective = Callable[[Tensor, Tensor], object]
"""A collective of a whole tensor, and of the part of a rank."""


def _sum(whole: Tensor, part: Tensor) -> object:
    return dist.all_reduce(whole)


_COLLECTIVES: dict[str, _Collective] = {
    "all_gather": dist.all_gather_into_tensor,
    "reduce_scatter": lambda whole, part: dist.reduce_scatter_tensor(part, whole),
    "all_to_all": lambda whole, part: dist.all_to_all_single(torch.empty_like(whole), whole),
}
"""Collectives by their names in the table of a device, besides sums."""


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
        found = _speeds_of_ranks()
    finally:
        dist.destroy_process_group()
    if rank == 0:
        Path(folder, "speeds.json").write_text(json.dumps(found))


def _speeds_of_ranks() -> dict[str, Any]:
    """Return the speeds that each rank of the process group has while all of them work: fields of
    `Device`."""
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
        "operation_seconds": _operation_seconds(device),
        "new_byte_seconds": _new_byte_seconds(device),
        **(_link(device) if size > 1 else {"machine_bytes_per_second": copied}),
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


def _operation_seconds(device: torch.device) -> float:
    """Return the seconds of an operation on a few numbers, with what autograd adds."""
    values = torch.zeros(8, device=device, requires_grad=True)
    count = 1000

    def many() -> None:
        result = values
        for _ in range(count):
            result = result + 1

    return _seconds(many, device) / count


def _new_byte_seconds(device: torch.device) -> float:
    """Return how much longer a byte of a new tensor takes than one of a tensor that exists."""
    size = 1 << 26
    values = torch.ones(size, dtype=torch.uint8, device=device)
    new = _seconds(lambda: torch.ones(size, dtype=torch.uint8, device=device), device)
    return max(new - _seconds(lambda: values.fill_(1), device), 0.0) / size


def _link(device: torch.device) -> dict[str, Any]:
    """Return how quickly the ranks of this machine send to each other, and how far they compute
    meanwhile."""
    size, sending = _first_long_message(_sum, device)
    efficiency = {}
    for name, act in _COLLECTIVES.items():
        whole, seconds = _first_long_message(act, device)
        efficiency[name] = whole / seconds / (2 * size / sending)  # a sum sends each byte twice
    others = 1 - 1 / dist.get_world_size()
    return {
        "machine_bytes_per_second": 2 * others * size / sending,
        "message_seconds": _seconds(_message(_sum, 1024, device), device),
        "overlap": _overlap(size, sending, device),
        "collective_efficiency": efficiency,
    }


def _overlap(size: int, sending: float, device: torch.device) -> float:
    """Return the part of a message's time in which this device computes at full speed.

    `sending`: seconds of a sum over all ranks of `size` bytes.
    """
    values, factor = torch.zeros(size // 4, device=device), torch.rand(512, 512, device=device)
    count = math.ceil(sending / _seconds(lambda: factor @ factor, device))

    def compute() -> None:
        for _ in range(count):
            factor @ factor

    def compute_and_send() -> None:
        message = dist.all_reduce(values, async_op=True)
        compute()
        message.wait()

    computing, together = _seconds(compute, device), _seconds(compute_and_send, device)
    saved = (sending + computing - together) / min(sending, computing)
    return min(max(saved, 0.0), 1.0)


def _first_long_message(act: _Collective, device: torch.device) -> tuple[int, float]:
    """Return the bytes of a whole that takes long enough to be measured, and its seconds."""
    sizes = (2**power for power in range(20, 29))
    return _first_long(lambda size: _message(act, size, device), sizes, device)


def _message(act: _Collective, size: int, device: torch.device) -> Callable[[], object]:
    """Return a function that calls a collective with a whole of `size` bytes."""
    num_ranks = dist.get_world_size()
    part = torch.zeros(size // 4 // num_ranks, device=device)
    return partial(act, part.repeat(num_ranks), part)


def _first_long(
    of_size: Callable[[int], Callable[[], object]], sizes: Iterable[int], device: torch.device
) -> tuple[int, float]:
    """Return the first size that takes long enough to be measured, or the last, and its seconds."""
    for size in sizes:
        act = of_size(size)
        seconds = _seconds(act, device, total=0.0)
        if seconds >= _LONG_ENOUGH:
            break
    return size, _seconds(act, device)


def _seconds(act: Callable[[], object], device: torch.device, total: float = _TOTAL) -> float:
    """Return the seconds that this takes on the slowest rank, while all ranks do it: the median of
    at least `_REPEATS` times, and of as many as take `total` seconds."""
    act()
    first = _slowest(_once(act, device), device)
    count = max(_REPEATS, math.ceil(total / first))
    return _slowest(statistics.median(_once(act, device) for _ in range(count)), device)


def _once(act: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    start = time.perf_counter()
    act()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def _slowest(seconds: float, device: torch.device) -> float:
    """Return the largest of these seconds of all ranks."""
    value = torch.tensor(seconds, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)

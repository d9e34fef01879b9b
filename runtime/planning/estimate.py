"""Estimates how long a step takes on a device, from what it computes, moves and sends."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ..symbolic.step import FORWARD, UPDATE, SymbolicStep
from ..symbolic.trace import Message
from .devices import Device

__all__ = ["LINKS", "Estimate", "estimate", "sent_bytes"]

MACHINE, NETWORK = LINKS = ("machine", "network")
"""Links between ranks: those of one machine, and those between machines."""
_FORWARDS_OF_STEP = 3
"""A step without recomputation takes as many FLOPs as so many forwards, since a backward multiplies
each matrix twice: appendix B of https://arxiv.org/abs/2204.02311."""

_REUSED_BYTES = 32 << 20
"""The C library asks the system for each larger piece of memory, and keeps smaller ones: see
`M_MMAP_THRESHOLD` of https://man7.org/linux/man-pages/man3/mallopt.3.html."""


@dataclass(frozen=True)
class Estimate:
    """The time of a step, and where it goes."""

    seconds: float
    compute_seconds: float
    """Time of operations that take longer to compute than their operands to move."""
    memory_seconds: float
    """Time of operations that wait for memory, or are too small to take longer than any."""
    network_seconds: float
    """Time of waiting for messages."""
    flops: float
    """FLOPs of one rank, in all microbatches, recomputation included."""
    sent_bytes: Mapping[str, float]
    """Bytes that one rank sends, by link (see `LINKS`)."""
    utilization: float
    """FLOPs of the model per second, as a fraction of what the device can do. Recomputed ones do
    not count (MFU)."""

    @property
    def bound(self) -> str:
        """The largest part of the time: `compute`, `memory` or `network`."""
        parts = {
            "compute": self.compute_seconds,
            "memory": self.memory_seconds,
            "network": self.network_seconds,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass
class _Part:
    """Seconds of the forward or backward of one microbatch, or of the update."""

    compute: float = 0.0
    memory: float = 0.0
    overlapped: float = 0.0
    waited: float = 0.0

    @property
    def network(self) -> float:
        """Seconds of waiting for messages. Messages that are sent meanwhile count as far as they
        take longer than computing."""
        return self.waited + max(0.0, self.overlapped - self.compute - self.memory)


def estimate(step: SymbolicStep, device: Device) -> Estimate:
    """Estimate a step on this device.

    An operation takes as long as its FLOPs, or its bytes if they take longer (roofline,
    https://doi.org/10.1145/1498765.1498785), at least `Device.operation_seconds`, and what a large
    result adds (`Device.new_byte_seconds`). Messages take the time of their bytes over the slower
    link, and `Device.message_seconds`. Those that a forward or backward need not wait for take no
    time beside its longer computations, as far as the device can do both (`Device.overlap`).
    """
    parts: dict[tuple[bool, str], _Part] = defaultdict(_Part)
    times = {False: step.num_microbatches - 1, True: 1}
    flops = at_peak = forward_at_peak = 0.0
    for operation in step.operations:
        part = parts[operation.is_last, operation.phase]
        seconds = operation.flops / device.flops_of(operation.dtype)
        moving = operation.num_bytes / device.memory_bytes_per_second
        moving = max(moving, device.operation_seconds)
        if seconds > moving:
            part.compute += seconds
        else:
            part.memory += moving
        if operation.new_bytes > _REUSED_BYTES:
            part.memory += operation.new_bytes * device.new_byte_seconds
        flops += times[operation.is_last] * operation.flops
        at_peak += times[operation.is_last] * seconds
        if operation.phase == FORWARD:
            forward_at_peak += times[operation.is_last] * seconds
    sent = dict.fromkeys(LINKS, 0.0)
    speeds = {
        MACHINE: device.machine_bytes_per_second,
        NETWORK: device.network_bytes_per_second,
    }
    for message in step.messages:
        by_link = sent_bytes(message, device.ranks_per_machine)
        for link, num_bytes in by_link.items():
            sent[link] += times[message.is_last] * num_bytes
        seconds = max(by_link[link] / speeds[link] for link in LINKS)
        seconds = seconds / device.efficiency_of(message.name) + device.message_seconds
        part = parts[message.is_last, message.phase]
        if message.overlaps and message.phase != UPDATE:
            part.overlapped += device.overlap * seconds
            part.waited += (1 - device.overlap) * seconds
        else:
            part.waited += seconds
    compute, memory, network = (
        sum(times[is_last] * getattr(part, name) for (is_last, _), part in parts.items())
        for name in ("compute", "memory", "network")
    )
    total = compute + memory + network
    useful = min(at_peak, _FORWARDS_OF_STEP * forward_at_peak)
    return Estimate(total, compute, memory, network, flops, sent, useful / total if total else 0.0)


def sent_bytes(message: Message, ranks_per_machine: int) -> dict[str, float]:
    """Return the bytes that one rank sends, by link.

    The ranks of a group send in rings (https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).
    What enters a machine is shared by the network cards of its ranks in the group. In an exchange
    of all with all, each sends its part to each other one.
    """
    name, size, num_bytes = message.name.replace("_", ""), len(message.ranks), message.num_bytes
    machines = Counter(rank // ranks_per_machine for rank in message.ranks)
    near = max(machines.values())
    if "alltoall" in name:
        part = num_bytes / size
        return {MACHINE: (near - 1) * part, NETWORK: (size - near) * part}
    others = (size - 1) / size
    if "allreduce" in name:
        ring = 2 * others * num_bytes
    elif "gather" in name or "scatter" in name:
        ring = others * num_bytes
    else:
        ring = num_bytes if size > 1 else 0.0
    return {
        MACHINE: ring if near > 1 else 0.0,
        NETWORK: ring / near if len(machines) > 1 else 0.0,
    }

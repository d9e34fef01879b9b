"""The device of each rank: an accelerator that has collectives, or the host."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...kernel.errors import BackendUnavailable
from ...kernel.plan import Capabilities, Probe
from ...launched import local_rank
from ..common import accelerators, layouts
from ..common.accelerators import facts_of

__all__ = ["choose_device", "probe_devices", "promised"]


def choose_device(choice: str, only: str = "") -> torch.device:
    """Return `cpu`, or this process's device of a type such as `cuda`. `auto` takes an accelerator
    where torch finds any that has collectives. `only`: the one type that the driver can use.

    Raises `BackendUnavailable` when this machine has no such device, or fewer than local ranks.
    """
    found = _usable(only)
    if choice == "cpu" or (choice == "auto" and not found.count):
        return torch.device("cpu")
    kind = found.type if choice == "auto" else choice
    count = found.count if kind == found.type else 0
    if local_rank() >= count:
        raise BackendUnavailable(
            f"local rank {local_rank()} has no {kind} device: this machine shows {count} for ranks "
            "that work together. Start at most that many processes here, or train on the host "
            "(backend.device=cpu)"
        )
    return torch.device(kind, local_rank())


def probe_devices(preference: int, only: str = "", **versions: str) -> Probe:
    """Return the probe of a driver that runs on accelerators where there are any (`only`: of that
    type), else on the host."""
    if not dist.is_available():
        return Probe(False, "this build of torch has no torch.distributed", "pip install torch")
    found = _usable(only)
    library = facts_of(found.type).collectives
    which = f"{library} on {found.count} {found.type} device{'s' * (found.count > 1)}"
    return Probe(
        usable=True,
        reason=which if found.count else "gloo on the CPU",
        versions={"torch": torch.__version__, **versions},
        devices=tuple(found.names) or ("cpu",),
        memory_bytes=found.memory_bytes if found.count else layouts.host_memory(),
        preference=preference,
    )


def promised(device_type: str, **fields: Any) -> Capabilities:
    """Return what a driver of one process for each device of this type promises. `fields`: those of
    `Capabilities` that are up to the driver, such as `sharded`, in place of the device's."""
    facts = facts_of(device_type)
    given: dict[str, Any] = {
        "precisions": facts.precisions,
        "multi_process": True,
        "timeout_seconds": True,
        "stall_seconds": True,
        "compile": facts.compile,
        "even_blocks": True,
        "activation_checkpointing": True,
        "max_grad_value": True,
        "feeds_ahead": facts.streams,
        **fields,
    }
    return Capabilities(**given)


def _usable(only: str) -> accelerators.Found:
    """Return the accelerators whose tensors can be added up over ranks."""
    found = accelerators.find()
    is_usable = found.type == (only or found.type) and facts_of(found.type).collectives
    return found if is_usable else accelerators.Found()

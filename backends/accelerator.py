"""Any accelerator that torch knows, in one process: Apple's MPS, Intel's XPU, NPU, TPU, and devices
of third parties.

https://docs.pytorch.org/docs/stable/accelerator.html
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import torch

from ..data.ranges import Range, check_ranges
from ..kernel.contract import World
from ..kernel.errors import BackendUnavailable
from ..kernel.plan import Capabilities, Plan, Probe
from ..kernel.recipe import Batch
from .common import layouts, prefetch
from .common.accelerators import Accelerator, facts_of, find
from .common.plain_engine import PlainEngine
from .common.single_process import HostSession

__all__ = ["AcceleratorDriver", "driver", "promised"]


@dataclass(frozen=True)
class AcceleratorOptions:
    """The driver's own arguments."""

    index: Annotated[int, Range(0, of_machine=True)] = 0
    """Number of the device, among those that are visible."""

    def __post_init__(self) -> None:
        check_ranges(self, "backend.")


class AcceleratorDriver:
    """One process on the device that torch finds."""

    name = "accelerator"
    options_type = AcceleratorOptions
    layout = staticmethod(layouts.replicated_layout)

    def probe(self) -> Probe:
        found, versions = find(), {"torch": torch.__version__}
        if not found.count:
            kind = found.type.upper()
            which = f"no {kind} device is visible" if kind else "it is for CPUs only"
            return Probe(False, f"this build of torch finds no accelerator: {which}", "", versions)
        return Probe(
            usable=True,
            reason=f"{found.type} ({found.count} visible, one is used)",
            versions=versions,
            devices=tuple(found.names[:1]),
            memory_bytes=found.memory_bytes // found.count,
            preference=10,
        )

    def capabilities(self, plan: Plan) -> Capabilities:
        return promised(facts_of(find().type))

    @contextmanager
    def open(self, plan: Plan) -> Iterator[AcceleratorSession]:
        found = find()
        if not found.count:
            raise BackendUnavailable(
                f"backend {self.name!r} cannot run here: {self.probe().reason}"
            )
        options = plan.options or AcceleratorOptions()
        if options.index >= found.count:
            raise BackendUnavailable(
                f"backend.index={options.index}: this machine shows {found.count} devices of the "
                f"type {found.type}, the first of which is 0"
            )
        torch.accelerator.set_device_index(options.index)
        yield AcceleratorSession(plan, torch.device(found.type, options.index))


def promised(facts: Accelerator) -> Capabilities:
    """Return what the driver promises on a device with these facts."""
    return Capabilities(
        precisions=facts.precisions,
        multi_process=False,
        sharded=False,
        compile=facts.compile,
        activation_checkpointing=True,
        max_grad_value=True,
        feeds_ahead=facts.streams,
    )


class AcceleratorSession(HostSession):
    """A session on one device."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        sums_on = facts_of(device.type).sums_on
        world = World(0, 1, device, feeder_index=0, num_feeders=1, sums_on=sums_on)
        super().__init__(plan, PlainEngine, world)

    def feed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return prefetch.feed(batches, self.world.device)


driver = AcceleratorDriver()

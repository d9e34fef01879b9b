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
from .common.accelerators import Accelerator, facts_of
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
        versions = {"torch": torch.__version__}
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None:
            built = torch.accelerator.current_accelerator()
            which = f"no {built.type.upper()} device is visible" if built else "it is for CPUs only"
            return Probe(False, f"this build of torch finds no accelerator: {which}", "", versions)
        try:
            known = torch.get_device_module(device)
            count = torch.accelerator.device_count()
        except RuntimeError as error:
            return Probe(False, f"torch knows too little of {device.type}: {error}", "", versions)
        if not count:
            return Probe(False, f"no {device.type} device is visible", "", versions)
        name = getattr(known, "get_device_name", lambda index: device.type)(0)
        return Probe(
            usable=True,
            reason=f"{device.type} ({count} visible, one is used)",
            versions=versions,
            devices=(name,),
            preference=10,
        )

    def capabilities(self, plan: Plan) -> Capabilities:
        device = torch.accelerator.current_accelerator()
        return promised(facts_of("" if device is None else device.type))

    @contextmanager
    def open(self, plan: Plan) -> Iterator[AcceleratorSession]:
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None:
            raise BackendUnavailable(
                f"backend {self.name!r} cannot run here: {self.probe().reason}"
            )
        options = plan.options or AcceleratorOptions()
        if options.index >= (count := torch.accelerator.device_count()):
            raise BackendUnavailable(
                f"backend.index={options.index}: this machine shows {count} devices of the type "
                f"{device.type}, the first of which is 0"
            )
        torch.accelerator.set_device_index(options.index)
        yield AcceleratorSession(plan, torch.device(device.type, options.index))


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
        sums_on = None if facts_of(device.type).float64 else torch.device("cpu")
        world = World(0, 1, device, feeder_index=0, num_feeders=1, sums_on=sums_on)
        super().__init__(plan, PlainEngine, world)

    def feed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return prefetch.feed(batches, self.world.device)


driver = AcceleratorDriver()

"""The drivers `accelerator` and `ddp` on the simulated device, which an option lets misbehave."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from device_faults import PLANTS

from drivetrain.backends.accelerator import AcceleratorDriver, AcceleratorSession, promised
from drivetrain.backends.common import layouts
from drivetrain.backends.common.accelerators import Accelerator
from drivetrain.backends.process_group import replicated
from drivetrain.backends.process_group.session import ProcessGroupSession, process_group
from drivetrain.conformance import simulated_collectives
from drivetrain.conformance.simulated_device import DEVICE, device, register
from drivetrain.kernel.plan import Capabilities, Plan, Probe

facts = Accelerator(streams=False, float64=False, collectives=simulated_collectives.NAME)


@dataclass(frozen=True)
class SimulatedOptions:
    """Name of the planted fault."""

    fault: str = ""


@dataclass(frozen=True)
class ReplicatedOptions(replicated.ReplicatedOptions, SimulatedOptions):
    """Options of replicas, and the name of the planted fault."""


@contextmanager
def simulated(plan: Plan) -> Iterator[None]:
    """Let this process have the device, with the fault of the plan."""
    register()
    fault = (plan.options or SimulatedOptions()).fault
    before = dict(vars(device))
    device.has_float64 = False
    if fault:
        device.replaced = {}
        PLANTS[fault](device)
    try:
        yield
    finally:
        vars(device).clear()
        vars(device).update(before)


def probed() -> Probe:
    return Probe(True, "simulated", "", {"torch": torch.__version__}, preference=-100)


class SimulatedDriver(AcceleratorDriver):
    """`accelerator`, in a process whose accelerator is the simulated device from `open` on."""

    name = "simulated"
    options_type = SimulatedOptions  # type: ignore[assignment]

    def probe(self) -> Probe:
        return probed()

    def capabilities(self, plan: Plan) -> Capabilities:
        return promised(facts)

    @contextmanager
    def open(self, plan: Plan) -> Iterator[AcceleratorSession]:
        with simulated(plan), super().open(dataclasses.replace(plan, options=None)) as session:
            yield session


class ReplicatedDriver:
    """`ddp`, in processes that have a simulated device each."""

    name = "simulated_ranks"
    options_type = ReplicatedOptions
    layout = staticmethod(layouts.replicated_layout)

    def probe(self) -> Probe:
        return probed()

    def capabilities(self, plan: Plan) -> Capabilities:
        return replicated.promised(DEVICE)

    @contextmanager
    def open(self, plan: Plan) -> Iterator[ProcessGroupSession]:
        simulated_collectives.register()
        with simulated(plan), process_group(plan, torch.device(DEVICE, 0)) as world:
            yield ProcessGroupSession(plan, world, replicated.DdpEngine)


driver = SimulatedDriver()
driver_of_ranks = ReplicatedDriver()

"""The driver `accelerator` on the simulated device, which an option lets misbehave."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from device_faults import FAULTS

from drivetrain.backends.accelerator import AcceleratorDriver, AcceleratorSession, promised
from drivetrain.backends.common.accelerators import Accelerator
from drivetrain.conformance.simulated_device import device, register
from drivetrain.kernel.plan import Capabilities, Plan, Probe

facts = Accelerator(streams=False, float64=False)


@dataclass(frozen=True)
class SimulatedOptions:
    """Name of the planted fault."""

    fault: str = ""


class SimulatedDriver(AcceleratorDriver):
    """`accelerator`, in a process whose accelerator is the simulated device from `open` on."""

    name = "simulated"
    options_type = SimulatedOptions  # type: ignore[assignment]

    def probe(self) -> Probe:
        return Probe(True, "simulated", "", {"torch": torch.__version__}, preference=-100)

    def capabilities(self, plan: Plan) -> Capabilities:
        return promised(facts)

    @contextmanager
    def open(self, plan: Plan) -> Iterator[AcceleratorSession]:
        register()
        fault = (plan.options or SimulatedOptions()).fault
        before = dict(vars(device))
        device.has_float64 = False
        if fault:
            device.replaced = {}
            FAULTS[fault].plant(device)
        try:
            with super().open(dataclasses.replace(plan, options=None)) as session:
                yield session
        finally:
            vars(device).clear()
            vars(device).update(before)


driver = SimulatedDriver()

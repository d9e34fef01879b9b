"""A correct driver with one planted fault, which an option selects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from faults import FAULTS, NO_FAULTS, Fault

from drivetrain.backends.ddp import driver as sound
from drivetrain.kernel.contract import Session
from drivetrain.kernel.plan import Capabilities, Plan, Probe


@dataclass(frozen=True)
class FaultyOptions:
    """Name of the planted fault."""

    fault: str = "none"


class FaultyDriver:
    """Wraps the objects of the correct driver; each fault replaces one method somewhere."""

    name = "faulty"
    options_type = FaultyOptions

    def probe(self) -> Probe:
        return sound.probe()

    def capabilities(self, plan: Plan) -> Capabilities:
        fault = fault_of(plan)
        return fault.capabilities(sound.capabilities(dataclasses.replace(plan, options=None)))

    @contextmanager
    def open(self, plan: Plan) -> Iterator[Session]:
        fault = fault_of(plan)
        with sound.open(fault.plan(dataclasses.replace(plan, options=None))) as session:
            wrapped: Any = fault.session(session, plan)
            wrapped.build = fault.engine
            yield wrapped


def fault_of(plan: Plan) -> Fault:
    return {**FAULTS, **NO_FAULTS}[(plan.options or FaultyOptions()).fault]


class UnavailableDriver(FaultyDriver):
    """A driver that lacks a requirement on every machine."""

    name = "unavailable"

    def probe(self) -> Probe:
        return Probe(False, "there is no unobtainium here", "pip install unobtainium")


driver = FaultyDriver()
unavailable = UnavailableDriver()

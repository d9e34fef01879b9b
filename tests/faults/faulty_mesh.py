"""A mesh that is right but for one planted fault, which is chosen by an option."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mesh_faults import planted

from drivetrain.backends.mesh.driver import MeshDriver, MeshOptions
from drivetrain.backends.process_group.session import ProcessGroupSession
from drivetrain.kernel.plan import Plan


@dataclass(frozen=True)
class FaultyMeshOptions(MeshOptions):
    """What is wrong."""

    fault: str = ""


class FaultyMeshDriver(MeshDriver):
    """While a session is open, the fault is there."""

    name = "faulty-mesh"
    options_type = FaultyMeshOptions

    @contextmanager
    def open(self, plan: Plan) -> Iterator[ProcessGroupSession]:
        options = plan.options or FaultyMeshOptions()
        with planted(options.fault), super().open(plan) as session:
            yield session


driver = FaultyMeshDriver()

"""A correct mesh driver with one planted fault, which an option selects."""

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
    """Options of a mesh, and the name of the planted fault."""

    fault: str = ""


class FaultyMeshDriver(MeshDriver):
    """A mesh driver that has the planted fault while a session is open."""

    name = "faulty-mesh"
    options_type = FaultyMeshOptions

    @contextmanager
    def open(self, plan: Plan) -> Iterator[ProcessGroupSession]:
        options = plan.options or FaultyMeshOptions()
        with planted(options.fault), super().open(plan) as session:
            yield session


driver = FaultyMeshDriver()

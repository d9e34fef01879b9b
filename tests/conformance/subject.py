"""The driver under test, seen from outside: jobs are sent to its ranks, and answers judged here.

The driver is never imported in this process, so that several can be tested from one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ..kernel.errors import BackendUnavailable
from .bench import Bench
from .harness import Pool, lend

__all__ = ["Facts", "Subject"]

T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """Facts that a driver states before it runs."""

    name: str
    usable: bool
    reason: str
    versions: dict[str, str]
    devices: list[str]
    capabilities: dict[str, Any]

    @property
    def precisions(self) -> list[str]:
        return sorted(self.capabilities["precisions"])


def describe(bench: Bench) -> dict[str, Any]:
    """Job that returns the facts."""
    probe = bench.driver.probe()
    capabilities = dict(vars(bench.driver.capabilities(bench.plan())))
    capabilities["precisions"] = sorted(capabilities["precisions"])
    return {
        "name": bench.driver.name,
        "usable": probe.usable,
        "reason": probe.reason + (f"; install it with: {probe.install}" if probe.install else ""),
        "versions": {package: str(version) for package, version in probe.versions.items()},
        "devices": list(probe.devices),
        "capabilities": capabilities,
    }


@dataclass(frozen=True, eq=False)
class Subject:
    """A driver, its options, and the number of processes to run it in."""

    backend: str
    num_processes: int | None = None
    """World size; by default two if the driver supports it, else one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    peer_names: Sequence[str] | None = None
    """`NAME` or `NAME:PROCESSES` each; by default the same driver at other world sizes."""
    timeout_seconds: float = 180.0
    """Limit for one job; the longest one compiles a model."""
    python: str | None = None
    """The interpreter of the ranks, when the driver is installed in another environment."""
    imports: Sequence[str] = ()
    """Modules of the jobs that all ranks need. They are imported once, and not on each rank."""
    stand_ins: dict[str, str] = field(default_factory=dict)
    """Problem that the options refuse -> its stand-in, and the reason."""

    def run(
        self,
        job: Callable[..., T],
        /,
        *,
        world: int | None = None,
        alone: bool = False,
        **arguments: Any,
    ) -> list[T]:
        """Return the values of `job(bench, **arguments)` on each rank of a world (by default the
        subject's own). `job` must be importable, and its arguments must be JSON. `alone`: run in
        new processes and close them afterwards, for jobs that may leave them unusable, such as a
        collective that fails. Raises `WorkerFailure`.
        """
        world = world or self.world
        if alone:
            with closing(Pool(world, self.python, self._packages)) as ranks:
                return self._call(ranks, job, arguments)
        with lend(self._kind, world, self.python, self._packages) as ranks:
            return self._call(ranks, job, arguments)

    def _call(self, ranks: Pool, job: Callable[..., T], arguments: dict[str, Any]) -> list[T]:
        message = {
            "function": f"{job.__module__}:{job.__qualname__}",
            "bench": {"backend": self.backend, "options": dict(self.options)},
            "arguments": arguments,
        }
        return ranks.call(message, self.timeout_seconds)

    @functools.cached_property
    def _kind(self) -> str:
        """Key of the processes that serve this driver. A driver of one process may fix options for
        the life of the process, such as the number of devices: the key includes them. Where there
        are many processes, each session has its own options.
        """
        fixed = {} if self.can("multi_process") else self.options
        return " ".join([self.backend, *(f"{k}={v}" for k, v in sorted(fixed.items()))])

    @functools.cached_property
    def _packages(self) -> list[str]:
        """Modules besides torch that the driver and the jobs need, as ranks import them."""
        names = sorted(name.replace("-", "_") for name in {*self.facts.versions} - {"torch"})
        return [*names, *self.imports]

    @functools.cached_property
    def facts(self) -> Facts:
        with lend(f"facts of {self.backend}", 1, self.python) as ranks:
            return Facts(**self._call(ranks, describe, {})[0])

    @functools.cached_property
    def world(self) -> int:
        """Number of processes in a run."""
        return self.num_processes or (2 if self.can("multi_process") else 1)

    @functools.cached_property
    def peers(self) -> list[Subject]:
        """Subjects to exchange checkpoints with."""
        if self.peer_names is None:
            others = (1, self.world + 1) if self.can("multi_process") else (1,)
            sizes = {self.at(size).world: None for size in others}
            return [self.at(size) for size in sizes if size != self.world or self.world == 1]
        return [replace(parse_peer(name), python=self.python) for name in self.peer_names]

    def at(self, num_processes: int) -> Subject:
        """Return the same driver with another number of processes, rounded up to one that it
        supports.
        """
        multiple = int(self.facts.capabilities["multiple_of_ranks"])
        size = -(-num_processes // multiple) * multiple
        return replace(self, num_processes=size, peer_names=None)

    def can(self, capability: str) -> bool:
        """Return True if the driver declares that ability."""
        return bool(self.facts.capabilities[capability])

    def to_json(self) -> dict[str, Any]:
        """Return the part of the subject that reports need."""
        facts = {
            name: getattr(self.facts, name) for name in ("versions", "devices", "capabilities")
        }
        return {
            "backend": self.backend,
            "processes": self.world,
            "options": dict(self.options),
            "stand_ins": dict(self.stand_ins),
            **facts,
        }

    def require_usable(self) -> None:
        """Raise `BackendUnavailable`, with the driver's reason, if it cannot run here."""
        if not self.facts.usable:
            raise BackendUnavailable(
                f"driver {self.backend!r} cannot run here: {self.facts.reason}"
            )

    def __str__(self) -> str:
        return f"{self.backend} in {self.world} process{'es' if self.world > 1 else ''}"


def parse_peer(text: str) -> Subject:
    """Parse `NAME` or `NAME:PROCESSES`."""
    name, _, processes = text.partition(":")
    return Subject(name, int(processes) if processes else None)

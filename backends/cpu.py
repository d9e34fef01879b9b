"""The reference driver: one process, on the CPU, as plain PyTorch trains.

Read it to learn what a driver is, with the session and the engine that it takes from `common`;
`docs/writing-a-driver.md` walks through them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..kernel.plan import Capabilities, Plan, Probe
from ..kernel.ranges import check_range, most_at_once
from .common import float8, layouts
from .common.plain_engine import PlainEngine
from .common.single_process import HostSession, threads_of_one_operation

__all__ = ["driver"]


@dataclass(frozen=True)
class CpuOptions(float8.Float8Options):
    """The driver's own arguments."""

    threads: int | None = None
    """Threads of one operation; torch's own choice by default."""

    def __post_init__(self) -> None:
        check_range("backend.threads", self.threads, 1, most_at_once())


class CpuDriver:
    """One process on the host."""

    name = "cpu"
    options_type = CpuOptions
    layout = staticmethod(layouts.replicated_layout)

    def probe(self) -> Probe:
        return Probe(
            usable=True,
            reason=f"{torch.get_num_threads()} threads",
            versions={"torch": torch.__version__},
            devices=("cpu",),
            memory_bytes=layouts.host_memory(),
        )

    def capabilities(self, plan: Plan) -> Capabilities:
        return Capabilities(
            **float8.promised(plan.options or CpuOptions(), torch.device("cpu")),
            multi_process=False,
            sharded=False,
            compile=True,
            activation_checkpointing=True,
            feeds_ahead=False,
        )

    @contextmanager
    def open(self, plan: Plan) -> Iterator[HostSession]:
        options = plan.options or CpuOptions()
        with threads_of_one_operation(options.threads):
            yield HostSession(plan, PlainEngine)


driver = CpuDriver()

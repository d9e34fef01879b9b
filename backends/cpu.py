"""The reference driver: one process, on the CPU, as plain PyTorch trains.

Read it to learn what a driver is, with the session and the engine that it takes from `common`;
`docs/writing-a-driver.md` walks through them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import torch

from ..data.ranges import Range, check_ranges
from ..kernel.plan import Capabilities, Plan, Probe
from .common import float8, layouts
from .common.plain_engine import PlainEngine
from .common.single_process import HostSession, threads_of_one_operation

__all__ = ["driver"]


@dataclass(frozen=True)
class CpuOptions(float8.Float8Options):
    """The driver's own arguments."""

    threads: Annotated[int, Range(1, of_machine=True, unit="threads")] | None = None
    """Threads of one operation; torch's own choice by default."""

    def __post_init__(self) -> None:
        check_ranges(self, "backend.")


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
            even_blocks=True,
            activation_checkpointing=True,
            max_grad_value=True,
            feeds_ahead=False,
        )

    @contextmanager
    def open(self, plan: Plan) -> Iterator[HostSession]:
        options = plan.options or CpuOptions()
        with threads_of_one_operation(options.threads):
            yield HostSession(plan, PlainEngine)


driver = CpuDriver()

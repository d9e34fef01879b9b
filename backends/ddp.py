"""DistributedDataParallel: every rank holds the whole model; gradients are averaged over ranks.

By the accelerator's own library (NCCL on CUDA), or gloo on the CPU. https://arxiv.org/abs/2006.15704
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..kernel.plan import Capabilities, Plan, Probe
from ..kernel.recipe import Recipe
from ..launched import world_size
from .common import float8, layouts
from .process_group.devices import choose_device, probe_devices
from .process_group.replicated import DdpEngine, ReplicatedOptions, promised
from .process_group.session import ProcessGroupSession, process_group

__all__ = ["driver"]


@dataclass(frozen=True)
class DdpOptions(float8.Float8Options, ReplicatedOptions):
    """The driver's own arguments."""

    device: str = "auto"
    """`cpu`, or the type of an accelerator, such as `cuda`; `auto` takes an accelerator where there
    is one for every local rank."""


class DdpDriver:
    """One process for each device, all holding the whole model."""

    name = "ddp"
    options_type = DdpOptions
    layout = staticmethod(layouts.replicated_layout)

    def probe(self) -> Probe:
        probe = probe_devices(20)
        preferred = world_size() > 1 or probe.devices != ("cpu",)
        return probe if preferred else dataclasses.replace(probe, preference=-1)

    def capabilities(self, plan: Plan) -> Capabilities:
        device = _device(plan)
        return promised(device.type, **float8.promised(plan.options or DdpOptions(), device))

    def list_options(self, recipe: Recipe, world_size: int) -> Iterator[Mapping[str, Any]]:
        """See `ListsOptions`: there is one way."""
        return iter([{}])

    @contextmanager
    def open(self, plan: Plan) -> Iterator[ProcessGroupSession]:
        with process_group(plan, _device(plan)) as world:
            yield ProcessGroupSession(plan, world, DdpEngine)


def _device(plan: Plan) -> torch.device:
    return choose_device((plan.options or DdpOptions()).device)


driver = DdpDriver()

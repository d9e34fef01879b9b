"""DistributedDataParallel: every rank holds the whole model; gradients are averaged over ranks.

NCCL where there is CUDA, gloo on the CPU. https://arxiv.org/abs/2006.15704
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..kernel.plan import Capabilities, Plan, Probe
from ..kernel.recipe import Recipe
from ..launched import world_size
from .common import float8, layouts
from .process_group.replicated import SAVES_MEMORY, DdpEngine, ReplicatedOptions
from .process_group.session import (
    ProcessGroupSession,
    choose_device,
    probe_devices,
    process_group,
)

__all__ = ["driver"]


@dataclass(frozen=True)
class DdpOptions(float8.Float8Options, ReplicatedOptions):
    """The driver's own arguments."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`cuda` or `cpu`; `auto` takes CUDA where there is a device for every local rank."""


class DdpDriver:
    """One process for each device, all holding the whole model."""

    name = "ddp"
    options_type = DdpOptions
    layout = staticmethod(layouts.replicated_layout)

    def probe(self) -> Probe:
        preferred = world_size() > 1 or torch.cuda.device_count() > 0
        return probe_devices(20 if preferred else -1)

    def capabilities(self, plan: Plan) -> Capabilities:
        return Capabilities(
            **float8.promised(plan.options or DdpOptions(), _device(plan)),
            multi_process=True,
            timeout_seconds=True,
            stall_seconds=True,
            sharded=False,
            compile=True,
            even_blocks=True,
            activation_checkpointing=True,
            max_grad_value=True,
            feeds_ahead=_device(plan).type != "cpu",
            saves_memory=SAVES_MEMORY,
        )

    def list_options(self, recipe: Recipe, world_size: int) -> Iterator[Mapping[str, Any]]:
        """See `ListsOptions`: there is one way."""
        return iter([{}])

    @contextmanager
    def open(self, plan: Plan) -> Iterator[ProcessGroupSession]:
        device = _device(plan)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with process_group(plan, device) as world:
            yield ProcessGroupSession(plan, world, DdpEngine)


def _device(plan: Plan) -> torch.device:
    return choose_device((plan.options or DdpOptions()).device)


driver = DdpDriver()

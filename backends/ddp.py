"""DistributedDataParallel: every rank holds the whole model; gradients are averaged over ranks.

NCCL where there is CUDA, gloo on the CPU. https://arxiv.org/abs/2006.15704
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..kernel.contract import (
    Capabilities,
    Layout,
    Plan,
    Probe,
    Recipe,
    World,
)
from . import _torch
from ._distributed import (
    ProcessGroupSession,
    choose_device,
    num_launched,
    probe_devices,
    process_group,
)
from ._replicated import DdpEngine

__all__ = ["driver"]


@dataclass(frozen=True)
class DdpOptions:
    """Arguments of `torch.nn.parallel.DistributedDataParallel`, with its defaults."""

    device: str = "auto"
    """`cuda` or `cpu`; `auto` takes CUDA where there is a device for every local rank."""
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    sync_buffers: bool = True
    """Give every rank rank 0's buffers before each forward."""
    static_graph: bool = False


def _engine(recipe: Recipe, plan: Plan, world: World) -> DdpEngine:
    options = plan.options or DdpOptions()
    return DdpEngine(
        recipe,
        plan,
        world,
        bucket_cap_mb=options.bucket_cap_mb,
        find_unused_parameters=options.find_unused_parameters,
        static_graph=options.static_graph,
        **({} if options.sync_buffers else _no_buffer_sync()),
    )


class DdpDriver:
    """One process for each device, all holding the whole model."""

    name = "ddp"
    options_type = DdpOptions

    def probe(self) -> Probe:
        preferred = num_launched() > 1 or torch.cuda.device_count() > 0
        return probe_devices(20 if preferred else -1)

    def capabilities(self, plan: Plan) -> Capabilities:
        return Capabilities(
            precisions=frozenset({"fp32", "bf16", "fp16"}),
            multi_process=True,
            sharded=False,
            compile=True,
            activation_checkpointing=True,
            feeds_ahead=_device(plan).type != "cpu",
        )

    def layout(
        self, plan: Plan, model: nn.Module, state_bytes: Mapping[str, int], world_size: int
    ) -> Layout:
        return _torch.replicated_layout(plan, model, state_bytes)

    @contextmanager
    def open(self, plan: Plan) -> Iterator[ProcessGroupSession]:
        device = _device(plan)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with process_group(plan, device) as world:
            yield ProcessGroupSession(plan, world, _engine)


def _device(plan: Plan) -> torch.device:
    return choose_device((plan.options or DdpOptions()).device)


def _no_buffer_sync() -> dict[str, Any]:
    # the argument was renamed in torch 2.15; delete the old name when 2.14 is no longer supported
    known = inspect.signature(DistributedDataParallel).parameters
    return {
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False
    }


driver = DdpDriver()

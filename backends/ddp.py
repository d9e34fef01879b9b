"""DistributedDataParallel: every rank holds the whole model; gradients are averaged over ranks.

NCCL where there is CUDA, gloo on the CPU. https://arxiv.org/abs/2006.15704
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..kernel.contract import (
    Capabilities,
    Layout,
    Outcome,
    Piece,
    Plan,
    Probe,
    Reader,
    Recipe,
    World,
)
from . import _torch
from ._distributed import (
    ProcessGroupSession,
    choose_device,
    collective_failed,
    num_launched,
    probe_devices,
    process_group,
)

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
            yield ProcessGroupSession(plan, world, DdpEngine)


def _device(plan: Plan) -> torch.device:
    return choose_device((plan.options or DdpOptions()).device)


def _no_buffer_sync() -> dict[str, Any]:
    # the argument was renamed in torch 2.15; delete the old name when 2.14 is no longer supported
    known = inspect.signature(DistributedDataParallel).parameters
    return {
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False
    }


class DdpEngine:
    """The module in DistributedDataParallel; what is saved is as in one process."""

    def __init__(self, recipe: Recipe, plan: Plan, world: World) -> None:
        options = plan.options or DdpOptions()
        self.plan, self.world = plan, world
        self.own = _torch.build_model(recipe, plan, world.device)
        self.tied = _torch.tied_groups(self.own)
        self.parameters = [p for p in self.own.parameters() if p.requires_grad]
        self.optimizer = _torch.build_optimizer(recipe, self.own)
        self.autocast = _torch.autocast(plan, world.device)
        self.loss_scale = _torch.LossScale(world.device) if plan.precision.loss_scaling else None
        if plan.compile:
            self.own.compile()
        self.module = DistributedDataParallel(
            self.own,
            bucket_cap_mb=options.bucket_cap_mb,
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
            gradient_as_bucket_view=True,
            **({} if options.sync_buffers else _no_buffer_sync()),
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups  # `load_state_dict` makes a new list

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        return _torch.NO_CONTEXT if last else self.module.no_sync()

    def backward(self, loss: Tensor) -> None:
        if self.loss_scale is not None:
            loss = loss * self.loss_scale.scale
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except dist.DistError as error:
            raise collective_failed("averaging gradients", self.world.rank, error) from error

    def update(self) -> Outcome:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if self.loss_scale is not None:
            self.loss_scale.unscale(grads)
        norm = _torch.global_norm(grads)
        return _torch.step_if_finite(
            self.optimizer, grads, norm, self.plan.max_grad_norm, self.loss_scale
        )

    def shards(self) -> Iterator[Piece]:
        return _torch.replicated_pieces(
            self.own, self.optimizer, self.loss_scale, self.world.rank, self.world.size
        )

    def restore(self, reader: Reader) -> None:
        _torch.restore_replicated(reader, self.own, self.optimizer, self.loss_scale)

    def full_params(self, names: Sequence[str] | None = None) -> AbstractContextManager[nn.Module]:
        return nullcontext(self.own)


driver = DdpDriver()

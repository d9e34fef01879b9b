"""Fully sharded data parallelism: each rank keeps a part of every weight, gradient and state.

FSDP2, `torch.distributed.fsdp.fully_shard` (https://arxiv.org/abs/2304.11277); NCCL where there is
CUDA, gloo on the CPU. The model is divided into *units*: the weights of a unit are gathered when
its forward or backward begins, and freed afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...kernel.plan import Capabilities, Layout, Plan, Probe
from ...kernel.recipe import Recipe
from ...launched import world_size
from ..common import float8
from ..process_group.devices import choose_device, probe_devices, promised
from ..process_group.session import ProcessGroupSession
from . import sharding, wrap_units
from .held_parts import HoldingEngine
from .sharding import FsdpOptions

__all__ = ["FsdpOptions", "driver"]

_LOG = logging.getLogger(__name__)


FOR_ACCELERATORS = {"gather_dtype": "compute"}
"""Options that are chosen on accelerators, and not on the CPU."""


class FsdpDriver:
    """One process for each device, each holding a part of the model."""

    name = "fsdp"
    options_type: type[Any] = FsdpOptions

    def probe(self) -> Probe:
        return probe_devices(10 if world_size() > 1 else -2)

    def capabilities(self, plan: Plan) -> Capabilities:
        options = sharding.options_of(plan)
        device = choose_device(options.device)
        return promised(
            device.type,
            **float8.promised(options, device),
            sharded=True,
            uneven_gradients=False,
            saves_memory="start more ranks; or set backend.cpu_offload=true, which keeps weights "
            "and the optimizer's state in host memory",
        )

    def list_options(self, recipe: Recipe, world_size: int) -> Iterator[Mapping[str, Any]]:
        """See `ListsOptions`: sizes of groups that shard, and what they keep. Gradients that are
        summed at each microbatch matter where memory is scarce."""
        for size in (None, *sharding.divisors(world_size)[1:-1]):
            for freed, summed in ((True, True), (True, False), (False, False)):
                yield {
                    **FOR_ACCELERATORS,
                    "shard_size": size,
                    "reshard_after_forward": freed,
                    "sync_each_microbatch": summed,
                }

    def layout(
        self, plan: Plan, model: nn.Module, state_bytes: Mapping[str, int], world_size: int
    ) -> Layout:
        options = sharding.options_of(plan)
        units = wrap_units.choose_units(model, options.wrap, options.min_unit_params)
        offloaded = ("weights, gradients and state in host memory",)
        return wrap_units.sharded_layout(
            plan,
            model,
            units,
            state_bytes,
            num_parts=self.num_parts(options, world_size),
            gathered=sharding.gathered_dtype(plan),
            keeps_gathered=not (options.reshard_after_forward and options.reshard_after_backward),
            accumulates_whole=not options.sync_each_microbatch
            and (plan.micro_batch or plan.global_batch) * world_size < plan.global_batch,
            notes=offloaded if options.cpu_offload else (),
        )

    def num_parts(self, options: Any, world_size: int) -> int:
        """Return the number of ranks over which a weight is sharded."""
        return options.shard_size or world_size

    @contextmanager
    def open(self, plan: Plan) -> Iterator[ProcessGroupSession]:
        sharding.shard_size(sharding.options_of(plan), world_size())  # raises
        if world_size() == 1:
            _LOG.warning("fsdp in one process shards nothing; launch more, or use cpu or ddp")
        with sharding.opened(plan) as world:
            yield ProcessGroupSession(plan, world, HoldingEngine)


driver = FsdpDriver()

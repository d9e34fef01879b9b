"""DistributedDataParallel, for every driver whose ranks each hold the whole model.

https://arxiv.org/abs/2006.15704
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..kernel.contract import Outcome, Piece, Plan, Reader, Recipe, World
from ..kernel.errors import RecipeError
from ..kernel.ranges import check_range
from . import _model, _state, _step
from ._distributed import naming_collectives

SAVES_MEMORY = "every rank holds the whole model: the backends fsdp and deepspeed cut it over ranks"


@dataclass(frozen=True)
class ReplicatedOptions:
    """Arguments of `torch.nn.parallel.DistributedDataParallel`, with its defaults."""

    bucket_cap_mb: int = 25
    """Gradients are averaged in buckets of this size, while backward goes on."""
    find_unused_parameters: bool = False
    """Look after each forward for parameters that took no part."""
    sync_buffers: bool = True
    """Give every rank rank 0's buffers before each forward."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""

    def __post_init__(self) -> None:
        check_range("backend.bucket_cap_mb", self.bucket_cap_mb, 0)

    def arguments(self) -> dict[str, Any]:
        """As this torch calls them."""
        # one was renamed in torch 2.15; delete the old name when 2.14 is no longer supported
        known = inspect.signature(DistributedDataParallel).parameters
        new, old = "forward_sync_buffers", "broadcast_buffers"
        return {
            "bucket_cap_mb": self.bucket_cap_mb,
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            new if new in known else old: self.sync_buffers,
        }


class DdpEngine:
    """The module in DistributedDataParallel; what is saved is as in one process."""

    def __init__(self, recipe: Recipe, plan: Plan, world: World) -> None:
        options: ReplicatedOptions = plan.options or ReplicatedOptions()
        self.plan, self.world = plan, world
        self.finds_unused = options.find_unused_parameters
        self.own = _model.build_model(recipe, plan, world.device)
        self.tied = _model.tied_groups(self.own)
        self.num_parameters = sum(p.numel() for p in self.own.parameters())
        self.parameters = [p for p in self.own.parameters() if p.requires_grad]
        self.optimizer = _model.build_optimizer(recipe, self.own)
        self._autocast = _model.autocast(plan, world.device)
        self.loss_scale = _step.LossScale(world.device) if plan.precision.loss_scaling else None
        if plan.compile:
            self.own.compile(**plan.compile_options)
        self.module = DistributedDataParallel(
            self.own, gradient_as_bucket_view=True, **options.arguments()
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups  # `load_state_dict` makes a new list

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        return _model.NO_CONTEXT if last else self.module.no_sync()

    def autocast(self) -> AbstractContextManager[Any]:
        call = "a forward, which takes over the buffers of rank 0"
        return naming_collectives(call, self.world.rank, inside=self._autocast())

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        with naming_collectives("averaging gradients in a backward", self.world.rank):
            _step.backward(loss, weight, self.loss_scale)

    def unused(self) -> Sequence[str]:
        names = _model.without_gradient(self.own)
        if names and not self.finds_unused:
            # it would wait for their gradients, and average none of those in a bucket with them
            raise RecipeError(
                f"rank {self.world.rank}: no gradient reached {', '.join(names)} in the first "
                "step: set backend.find_unused_parameters=true, or freeze them "
                "(requires_grad=False), or leave them out of the model"
            )
        return names

    def update(self) -> Outcome:
        return _step.update(
            self.optimizer, self.parameters, self.plan.max_grad_norm, self.loss_scale
        )

    def shards(self) -> Iterator[Piece]:
        return _state.replicated_pieces(
            self.own, self.optimizer, self.loss_scale, self.world.rank, self.world.size
        )

    def restore(self, reader: Reader) -> None:
        _state.restore_replicated(reader, self.own, self.optimizer, self.loss_scale)

    def full_params(self, names: Sequence[str] | None = None) -> AbstractContextManager[nn.Module]:
        return nullcontext(self.own)

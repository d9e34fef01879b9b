"""DistributedDataParallel, for every driver whose ranks each hold the whole model.

https://arxiv.org/abs/2006.15704
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..kernel.contract import Outcome, Piece, Plan, Reader, Recipe, World
from . import _torch
from ._distributed import collective_failed


class DdpEngine:
    """The module in DistributedDataParallel; what is saved is as in one process."""

    def __init__(self, recipe: Recipe, plan: Plan, world: World, **arguments: Any) -> None:
        self.plan, self.world = plan, world
        self.own = _torch.build_model(recipe, plan, world.device)
        self.tied = _torch.tied_groups(self.own)
        self.parameters = [p for p in self.own.parameters() if p.requires_grad]
        self.optimizer = _torch.build_optimizer(recipe, self.own)
        self.autocast = _torch.autocast(plan, world.device)
        self.loss_scale = _torch.LossScale(world.device) if plan.precision.loss_scaling else None
        if plan.compile:
            self.own.compile()
        self.module = DistributedDataParallel(self.own, gradient_as_bucket_view=True, **arguments)

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

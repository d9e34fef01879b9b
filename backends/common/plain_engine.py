"""An engine of plain PyTorch, for any driver whose ranks each hold the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from ...kernel.contract import Outcome, World
from ...kernel.plan import Plan
from ...kernel.recipe import Recipe
from ...kernel.shards import Piece, Reader
from . import model_state, models, stepping
from .optimizer_state import OptimizerState


class PlainEngine:
    """The user's own module, unwrapped. A driver's engine overrides what is different there."""

    def __init__(self, recipe: Recipe, plan: Plan, world: World) -> None:
        self.plan, self.world = plan, world
        self.own = self.build_model(recipe)
        self.module = self.own
        """The module that is called: put a wrapper here."""
        self.tied = models.tied_groups(self.own)
        self.num_parameters = sum(p.numel() for p in self.own.parameters())
        self.parameters = [p for p in self.own.parameters() if p.requires_grad]
        self.optimizer = models.build_optimizer(recipe, self.own)
        self.state = OptimizerState(self.optimizer, self.own)
        self.autocast = models.autocast(plan, world.device)
        self.loss_scale = stepping.LossScale(world.device) if plan.precision.loss_scaling else None
        if plan.compile:
            # in place: names and the module itself stay
            self.own.compile(**plan.compile_options)

    def build_model(self, recipe: Recipe) -> nn.Module:
        """The user's own module, on the device."""
        return models.build_model(recipe, self.plan, self.world.device)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups  # `load_state_dict` makes a new list

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        return models.NO_CONTEXT

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        stepping.backward(loss, weight, self.loss_scale)

    def unused(self) -> Sequence[str]:
        return models.without_gradient(self.own)

    def update(self) -> Outcome:
        return stepping.update(
            self.optimizer, self.parameters, self.plan.max_grad_norm, self.loss_scale
        )

    def shards(self) -> Iterator[Piece]:
        return model_state.replicated_pieces(
            self.own, self.state, self.loss_scale, self.world.rank, self.world.size
        )

    def restore(self, reader: Reader) -> None:
        model_state.restore_replicated(reader, self.own, self.state, self.loss_scale)

    def average(self, weight: float) -> None:
        self.state.averages.move(self.state.trained, weight)

    def averaged(self) -> AbstractContextManager[None]:
        return self.state.averages.shown_in(self.state.trained)

    def full_params(self, names: Sequence[str] | None = None) -> AbstractContextManager[nn.Module]:
        return nullcontext(self.own)

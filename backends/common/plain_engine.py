"""An engine of plain PyTorch, for any driver whose ranks each hold the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from ...kernel.contract import Outcome, World
from ...kernel.plan import Plan
from ...kernel.recipe import Recipe
from ...kernel.shards import Piece, Reader
from . import attached, model_state, models, stepping
from .extra_state import ExtraState
from .module_hooks import ModuleHooks
from .optimizer_state import OptimizerState
from .registered import Registered
from .shown import ShowsWholeWeights
from .update_random import UpdateRandom, of_device


class PlainEngine(ShowsWholeWeights):
    """The user's own module, unwrapped. A driver's engine overrides what differs."""

    def __init__(self, recipe: Recipe, plan: Plan, world: World) -> None:
        self.plan, self.world = plan, world
        self.own = self.build_model(recipe)
        self.module = self.own
        """The module that is called: put a wrapper here."""
        self.extra = ExtraState(self.own, world.device, world.rank, world.size)
        self.tied = models.tied_groups(self.own)
        self.num_parameters = sum(p.numel() for p in self.own.parameters())
        self.parameters = list(self.own.parameters())  # frozen ones may be thawed later
        self.optimizer = models.build_optimizer(recipe, self.own)
        attached.refuse_inexact_hooks(dict(self.own.named_parameters()), plan, world)
        self.module_hooks = ModuleHooks(self.own, plan, world)
        self.state = OptimizerState(self.optimizer, self.own)
        self.draws = UpdateRandom(plan.seed, of_device(world.device))
        self.number_update = self.draws.begin
        self.autocast = models.autocast(plan, world.device)
        self.loss_scale = stepping.LossScale(world.device) if plan.precision.loss_scaling else None
        if plan.compile:
            # in place: names and the module itself stay
            self.own.compile(**plan.compile_options)
        self.registered = Registered(self.own)

    def build_model(self, recipe: Recipe) -> nn.Module:
        """The user's own module, on the device."""
        return models.build_model(recipe, self.plan, self.world.device)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups  # `load_state_dict` makes a new list

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        if self.registered.new:
            self.follow(self.registered.take())
        return self.module_hooks.watching(last)

    def follow(self, registered: Mapping[str, nn.Parameter]) -> None:
        """Parameters were registered since the last microbatch: others, or the same by new names.
        Raises `RecipeError` for some in the places of others that the optimizer has."""
        self.state.look_again()
        self.parameters = list(self.own.parameters())

    def without_update(self) -> AbstractContextManager[Any]:
        """Enclose forward and backward of a microbatch whose gradients nobody keeps."""
        return models.NO_CONTEXT

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        stepping.backward(loss, weight, self.loss_scale)

    def unused(self) -> Sequence[str]:
        return models.without_gradient(self.own)

    def update(self) -> Outcome:
        plan = self.plan
        with self.draws.update(self.optimizer):
            return stepping.update(
                self.optimizer,
                self.parameters,
                plan.max_grad_norm,
                self.loss_scale,
                plan.max_grad_value,
                None if self._observer is None else self._show_update,
            )

    def shards(self) -> Iterator[Piece]:
        yield from self.extra.pieces()
        yield from model_state.replicated_pieces(
            self.own, self.state, self.loss_scale, self.world.rank, self.world.size
        )

    def restore(self, reader: Reader) -> None:
        extra = self.extra.read(reader)
        model_state.restore_replicated(reader, self.own, self.state, self.loss_scale)
        self.extra.load(extra)

    def average(self, weight: float) -> None:
        self.state.averages.move(self.state.trained, weight)

    def averaged(self) -> AbstractContextManager[None]:
        return self.state.averages.shown_in(self.state.trained)

    def change_weights(self, change: Callable[[Mapping[str, Any]], None]) -> None:
        change(self.own_parts())

    def full_params(self, names: Sequence[str] | None = None) -> AbstractContextManager[nn.Module]:
        return nullcontext(self.own)

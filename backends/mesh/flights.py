"""Steps of a pipeline, in which the microbatches of an update are in flight at once.

The kernel asks for forward and backward of one microbatch after the other. They wait for the last
of their update, since a schedule wants to know all; so an update's microbatches are the pipeline's,
and `micro_batch` says how large they are. `recipe.loss` is called for each, in each stage: but for
the last, it is left when the model's forward is, so that no recipe is written for this. What it
draws for a microbatch (noise, say) is the same in all stages, whenever they come to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...data.nested import leaves
from ...kernel.contract import World
from ...kernel.errors import RecipeError, ran_out
from ...kernel.plan import Plan
from ...kernel.recipe import Batch, Microstep, Recipe, check_loss
from ..common import random_state
from ..process_group.collectives import keep_for_a_while
from .logits import require_whole
from .pipeline import PipelineEngine
from .schedules import Shape, fly
from .shape import Mesh, options_of
from .stages import Left

__all__ = ["FlyingEngine"]

_Waiting = tuple[Batch, Microstep, int]
"""A microbatch, and the seed of what is drawn for it: the same in all stages."""


class FlyingEngine(PipelineEngine):
    """`PipelineEngine`, with steps of its own in place of the kernel's."""

    def __init__(self, recipe: Recipe, plan: Plan, world: World, mesh: Mesh) -> None:
        super().__init__(recipe, plan, world, mesh)
        self.module.register_forward_hook(self._leave)
        self._queue: list[_Waiting] = []
        self._flight: _Flight | None = None
        self._known: object = None
        """The shapes of a batch of the last update."""
        self._shapes: list[Any] = []
        """Of the activations that each stage of this rank receives and gives, for such a batch."""
        self._seen: list[Any] = [None] * self.stages.number
        """The same, in the last forward."""
        self.step = None if recipe.step is not None else self._step
        """Forward and backward of a microbatch, as a `Recipe.step` does them."""

    def compute(self, stage: int, received: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        made = super().compute(stage, received, *args, **kwargs)
        if received is not None:
            self._seen[stage - 1] = Shape(received.shape, received.dtype)
        if stage < self.stages.number - 1:
            self._seen[stage] = Shape(made.shape, made.dtype)
        return made

    def called(self, *args: Any, **kwargs: Any) -> Any:
        if (flight := self._flight) is None:
            return super().called(*args, **kwargs)
        return self.compute(flight.stage, flight.take_off(), *args, **kwargs)

    def _leave(self, module: nn.Module, args: Any, made: Any) -> None:
        """After what reduces and gathers weights has seen what the module returns: the loss is the
        last stage's matter."""
        if self._flight is not None and self._flight.stage < self.stages.number - 1:
            raise Left(made)

    def _step(self, module: nn.Module, batch: Batch, microstep: Microstep) -> Tensor:
        """Microbatches wait for the last of their update, and are then in flight together."""
        self._queue.append((batch, microstep, random_state.drawn_seed()))
        if not microstep.last:
            return torch.zeros((), device=self.world.device)
        queue, self._queue = self._queue, []
        items = microstep.num_items()
        weight = microstep.num_feeders / items if items else 0.0
        if self._may_fly(queue):
            return self._fly(queue, weight)
        return self._one_by_one(queue, weight)

    def _may_fly(self, queue: Sequence[_Waiting]) -> bool:
        """True if the shapes of activations are known: all ranks of a stage decide alike."""
        alike = {_shapes_of(batch) for batch, _, _ in queue}
        shapes = next(iter(alike)) if len(alike) == 1 else None
        known = shapes is not None and shapes == self._known
        self._known = shapes
        if self.peers.size == 1:
            return known
        unknown = keep_for_a_while(torch.tensor([float(not known)], device=self.world.device))
        with self._named("comparing the shapes of microbatches"):
            dist.all_reduce(unknown, group=self.peers.group)
        return not unknown.item()

    def _one_by_one(self, queue: Sequence[_Waiting], weight: float) -> Tensor:
        """What is slow: nothing is known of shapes, or they differ."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for index, (batch, microstep, seed) in enumerate(queue):
            with self.microbatch(index == len(queue) - 1):
                total = total + microstep.backward(self._loss_of(batch, seed), weight)
        self._shapes = [*self._seen]
        return total

    def _fly(self, queue: Sequence[_Waiting], weight: float) -> Tensor:
        device, last_stage = self.world.device, self.stages.number - 1
        told = torch.zeros(3, dtype=torch.float64, device=device)
        """The loss; whether a rank has failed, and whether for want of memory."""
        failed: list[Exception] = []
        left = len(queue) * len(self.own_stages)

        def compute(stage: int, received: Tensor | None, index: int) -> Tensor:
            try:
                made = self._in_flight(stage, received, *queue[index], weight, told)
            except Exception as error:  # others wait for this rank: it goes on to the end
                failed.append(error)
                shape = (1,) if stage == last_stage else self._shapes[stage].sizes
                made = torch.zeros(shape, device=device, requires_grad=True)
                made = made + (0.0 if received is None else received.sum() * 0)
            cast(Any, made).register_hook(begin_backward)
            return made

        def begin_backward(gradient: Tensor) -> None:
            nonlocal left
            left -= 1
            if not left:
                self._sync_gradients(True)

        self._sync_gradients(False)
        with self._named("handing activations or gradients on"):
            fly(
                options_of(self.plan).schedule,
                compute,
                self.own_stages,
                self.stages.number,
                len(queue),
                self._shapes,
                self.line,
            )
            if failed:
                told[1:] += torch.tensor([1.0, ran_out(failed[0])], device=device)
            dist.all_reduce(keep_for_a_while(told), group=self.line.group)
        if failed:
            raise failed[0]
        _raise_if_failed(told)
        return told[0]

    def _in_flight(
        self,
        stage: int,
        received: Tensor | None,
        batch: Batch,
        microstep: Microstep,
        seed: int,
        weight: float,
        told: Tensor,
    ) -> Tensor:
        """The forward of a microbatch in a stage: an activation, or at last the weighted loss."""
        self._flight = flight = _Flight(stage, received)
        try:
            told[0] += microstep.backward(self._loss_of(batch, seed), weight)
            return cast(Tensor, flight.weighted)
        except Left as end:
            made = cast(Tensor, end.activation)
            if Shape(made.shape, made.dtype) != (known := self._shapes[stage]):
                raise RecipeError(
                    f"between stages go activations of shape {tuple(made.shape)} where they were "
                    f"{tuple(known.sizes)}, for a batch of the same shapes: with backend.pipeline "
                    "they must follow from those of the batch"
                ) from None
            return made
        finally:
            self._flight = None

    def _loss_of(self, batch: Batch, seed: int) -> Tensor:
        with self.autocast(), random_state.seeded(seed, self.world.device):
            loss = self.recipe.loss(self.module, batch)
        check_loss(loss)
        return loss

    def _sync_gradients(self, last: bool) -> None:
        with self.microbatch(last):
            pass

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        if self._flight is None:
            super().backward(loss, weight)
            return
        require_whole(loss)
        if self.loss_scale is not None:
            weight = weight * self.loss_scale.scale
        self._flight.weighted = (loss * weight).reshape(1)


@dataclass
class _Flight:
    """One microbatch in one stage."""

    stage: int
    received: Tensor | None
    weighted: Any = None
    """Its loss, once that is known."""
    called: bool = False

    def take_off(self) -> Tensor | None:
        """Raises `RecipeError` the second time."""
        if self.called:
            raise RecipeError(
                "recipe.loss calls the module more than once: with backend.pipeline it may call "
                "it once. Join what it is called with into one batch, give the recipe a step of "
                "its own, in which microbatches go one after the other, or set backend.pipeline=1"
            )
        self.called = True
        return self.received


def _raise_if_failed(told: Tensor) -> None:
    """Where another rank of the line has failed."""
    _, failed, short = told.tolist()
    if short:
        raise torch.OutOfMemoryError("a rank of another stage has run out of memory")
    if failed:
        raise RecipeError("a rank of another stage has failed: look at its output")


def _shapes_of(batch: Batch) -> object:
    """Of all that a batch is made of."""
    found = (
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)
        for leaf in leaves(batch)
    )
    return tuple(found)

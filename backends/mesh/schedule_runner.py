"""Runs the microbatches of an update by a pipeline schedule, which interleaves them.

The kernel asks for forward and backward of one microbatch after the other. A schedule needs all of
them, so they wait for the last one of their update. `micro_batch` sets their size. Each stage calls
`recipe.loss` for each microbatch. In all stages but the last, the loss function is left when the
model's forward returns, so that no recipe is written for pipelines. Random numbers that it draws
for a microbatch (noise, say) are the same in all stages, whatever the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...data.nested import leaves
from ...kernel.errors import RecipeError, ran_out
from ...kernel.recipe import Batch, Microstep, Recipe, check_loss
from ..common import random_state
from ..fsdp.engine import FsdpEngine
from ..process_group.collectives import keep_for_a_while, naming_collectives
from .pipeline import PipelinePartition, StageRun
from .schedules import ActivationShape, run_schedule
from .shape import options_of
from .stages import StageExit

__all__ = ["ScheduleRunner"]

_Queued = tuple[Batch, Microstep, int]
"""A microbatch, and the seed of its random numbers, which is the same in all stages."""


class ScheduleRunner:
    """Runs the steps of an engine whose model is placed on the ranks of a pipeline."""

    def __init__(self, recipe: Recipe, engine: FsdpEngine, pipeline: PipelinePartition) -> None:
        self.recipe, self.engine, self.pipeline = recipe, engine, pipeline
        self.world, self.p2p = engine.world, pipeline.p2p
        self.num_stages = pipeline.stages.number
        self._queue: list[_Queued] = []
        self._last_batch_shapes: object = None
        """The shapes of the batches of the last update; None if they differed."""
        self._shapes: list[Any] = []
        """Shapes of the activations between stages, for such a batch; see `run_schedule`."""
        engine.module.register_forward_hook(self._exit_loss)

    def _exit_loss(self, module: nn.Module, args: Any, output: Any) -> None:
        """Leave `recipe.loss` after the model's forward, unless this is the last stage, which alone
        computes the loss. Called after the hooks that reduce and gather weights.
        """
        run = self.pipeline.running
        if run is not None and run.stage < self.num_stages - 1:
            raise StageExit(output)

    def step(self, module: nn.Module, batch: Batch, microstep: Microstep) -> Tensor:
        """Queue the microbatch; run all of an update when its last one comes."""
        self._queue.append((batch, microstep, random_state.drawn_seed()))
        if not microstep.last:
            return torch.zeros((), device=self.world.device)
        queue, self._queue = self._queue, []
        items = microstep.num_items()
        weight = microstep.num_feeders / items if items else 0.0
        if self._shapes_are_known(queue):
            return self._run_schedule(queue, weight)
        return self._one_by_one(queue, weight)

    def _shapes_are_known(self, queue: Sequence[_Queued]) -> bool:
        """Return True if the shapes of activations are known. All ranks of a stage decide alike."""
        alike = {_shapes_of(batch) for batch, _, _ in queue}
        shapes = next(iter(alike)) if len(alike) == 1 else None
        known = shapes is not None and shapes == self._last_batch_shapes
        self._last_batch_shapes = shapes
        if self.engine.peers.size == 1:
            return known
        unknown = keep_for_a_while(torch.tensor([float(not known)], device=self.world.device))
        with naming_collectives("comparing the shapes of microbatches", self.world.rank):
            dist.all_reduce(unknown, group=self.engine.peers.group)
        return not unknown.item()

    def _one_by_one(self, queue: Sequence[_Queued], weight: float) -> Tensor:
        """Run the microbatches one by one, which is slow: their shapes are unknown, or differ."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for index, (batch, microstep, seed) in enumerate(queue):
            with self.engine.microbatch(index == len(queue) - 1):
                total = total + microstep.backward(self._loss_of(batch, seed), weight)
        self._shapes = [*self.pipeline.shapes]
        return total

    def _run_schedule(self, queue: Sequence[_Queued], weight: float) -> Tensor:
        device, last_stage = self.world.device, self.num_stages - 1
        own_stages = self.pipeline.own_stages
        report = torch.zeros(3, dtype=torch.float64, device=device)
        """The loss, the number of ranks that have failed, and of those that ran out of memory."""
        failed: list[Exception] = []
        num_backwards_left = len(queue) * len(own_stages)

        def compute(stage: int, received: Tensor | None, index: int) -> Tensor:
            try:
                output = self._run_stage(stage, received, queue[index], weight, report)
            except Exception as error:  # other ranks wait for this one: continue to the end
                failed.append(error)
                shape = (1,) if stage == last_stage else self._shapes[stage].sizes
                output = torch.zeros(shape, device=device, requires_grad=True)
                output = output + (0.0 if received is None else received.sum() * 0)
            cast(Any, output).register_hook(begin_backward)
            return output

        def begin_backward(gradient: Tensor) -> None:
            nonlocal num_backwards_left
            num_backwards_left -= 1
            if not num_backwards_left:
                self._sync_gradients(True)

        self._sync_gradients(False)
        with naming_collectives("sending activations or gradients between stages", self.world.rank):
            run_schedule(
                options_of(self.engine.plan).schedule,
                compute,
                own_stages,
                self.num_stages,
                len(queue),
                self._shapes,
                self.p2p,
            )
            if failed:
                report[1:] += torch.tensor([1.0, ran_out(failed[0])], device=device)
            dist.all_reduce(keep_for_a_while(report), group=self.p2p.group)
        if failed:
            raise failed[0]
        _, num_failed, num_out_of_memory = report.tolist()
        if num_out_of_memory:
            raise torch.OutOfMemoryError("a rank of another stage has run out of memory")
        if num_failed:
            raise RecipeError("a rank of another stage has failed: look at its output")
        return report[0]

    def _run_stage(
        self,
        stage: int,
        received: Tensor | None,
        queued: _Queued,
        weight: float,
        report: Tensor,
    ) -> Tensor:
        """Run the forward of a microbatch in a stage. Returns an activation, or the weighted loss
        in the last stage.
        """
        batch, microstep, seed = queued
        self.pipeline.running = run = StageRun(stage, received)

        def keep_weighted(loss: Tensor, weight: Tensor) -> None:
            run.weighted_loss = (loss * weight).reshape(1)

        self.engine.deferred_backward = keep_weighted
        try:
            report[0] += microstep.backward(self._loss_of(batch, seed), weight)
            return cast(Tensor, run.weighted_loss)
        except StageExit as end:
            output = cast(Tensor, end.activation)
            if ActivationShape(output.shape, output.dtype) != (expected := self._shapes[stage]):
                raise RecipeError(
                    f"a stage returned an activation of shape {tuple(output.shape)} where it was "
                    f"{tuple(expected.sizes)}, for a batch of the same shapes: with "
                    "backend.pipeline shapes must follow from those of the batch"
                ) from None
            return output
        finally:
            self.pipeline.running = self.engine.deferred_backward = None

    def _loss_of(self, batch: Batch, seed: int) -> Tensor:
        with self.engine.autocast(), random_state.seeded(seed, self.world.device):
            loss = self.recipe.loss(self.engine.module, batch)
        check_loss(loss)
        return loss

    def _sync_gradients(self, last: bool) -> None:
        with self.engine.microbatch(last):
            pass


def _shapes_of(batch: Batch) -> object:
    """Return the shapes of all tensors in a batch."""
    return tuple(
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)
        for leaf in leaves(batch)
    )

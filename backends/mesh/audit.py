"""Compare gradients of a partitioned model with those of the whole one, before the first update and
again whenever the loss is computed by other operations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...data.parallel import Parallel
from ...kernel.errors import RecipeError
from ...kernel.recipe import Batch, Recipe, check_loss
from ..common import models, prefetch, stepping
from ..common.buffers import buffers_kept
from ..common.compiled import eagerly
from ..common.extra_state import extra_state_kept
from ..fsdp import dtensor
from ..fsdp.engine import FsdpEngine
from ..fsdp.sharding import gathered_dtype
from ..process_group.collectives import keep_for_a_while, naming_call
from .comparing import (
    SCALES,
    Verdict,
    draw,
    explain_mixed_tensors,
    judge,
    last_operations,
    reached,
    repeatable_forward,
)
from .context import ContextPartition
from .logits import refuse_partitioned_loss
from .node_names import Mark, marked_inputs, name_of
from .pipeline import PipelinePartition
from .shape import Mesh

__all__ = ["GradientAudit", "gradient_audit"]

_LOG = logging.getLogger(__name__)

_CAUSES = {
    "expert": "Experts must treat each token by itself, whatever other tokens they receive, and "
    "find their number by their weights or by their module's num_experts",
    "pipeline": "A stage sends the first argument of a block to the next stage, and nothing else: "
    "neither what blocks keep for the loss, nor what bypasses them. Name other blocks in "
    "Parallel.stages",
    "tensor": "Fused layers, such as queries, keys and values in one, must be named in "
    "Parallel.fused, and modules between 'column' and 'row' must accept as many heads or units as "
    "they are given; with 'sequence' no value for a part of the positions may be added to the "
    "loss, such as an auxiliary loss of routers",
    "context": "The model must be given the positions of each part (Parallel.positions), targets "
    "must be shifted before the batch is split, the loss must be a sum over positions that draws "
    "no random numbers (collate may), and only scaled_dot_product_attention may combine positions",
}
"""By dimension: reasons why a partitioned model may compute something else than the whole one."""

_PAST_THE_STAGES = (
    "with backend.pipeline={size} the loss uses {names} past the blocks of the last stage: what "
    "earlier blocks keep for the loss (an auxiliary loss, say), or what bypasses blocks (where "
    "Parallel.stages names parts of blocks, say), never reaches the last stage. Let blocks return "
    "it in their first output, leave it out, or set backend.pipeline=1"
)

_MOST_COMPARED = 500_000_000
"""Most parameters of a model that is gathered to compare its layers."""

_NOT_COMPARED = (
    "partitioned layers, experts and stages were not compared with whole ones: the model has %s "
    "parameters, and more than %s are not gathered for it. A smaller model of the same kind is"
)


def gradient_audit(
    recipe: Recipe,
    engine: FsdpEngine,
    mesh: Mesh,
    context: ContextPartition | None,
    pipeline: PipelinePartition | None,
) -> GradientAudit | None:
    """Return the comparison for an engine; None if nothing is compared."""
    partitioned = max(mesh.shape.tensor, mesh.shape.expert, mesh.shape.pipeline) > 1
    compare = (recipe.parallel or Parallel()).compare
    if not ((partitioned or context is not None) and compare and engine.plan.options.check):
        return None
    gathers = engine.num_parameters <= _MOST_COMPARED
    if partitioned and not gathers and engine.world.is_first_of_reader:
        _LOG.warning(_NOT_COMPARED, engine.num_parameters, _MOST_COMPARED)
    if not gathers and context is None:
        return None
    training = compare is True  # another function than the loss may count its samples
    loss = recipe.loss if compare is True else compare
    return GradientAudit(engine, mesh, context, pipeline, loss, gathers and partitioned, training)


class GradientAudit:
    """Comparison by `loss`. `gathers`: gather the whole model on each rank; else compare only whole
    sequences with parts of them. `training`: compare in training mode unless that draws random
    numbers; else in evaluation mode. All ranks call each method."""

    def __init__(
        self,
        engine: FsdpEngine,
        mesh: Mesh,
        context: ContextPartition | None,
        pipeline: PipelinePartition | None,
        loss: Callable[[nn.Module, Batch], Tensor],
        gathers: bool,
        training: bool,
    ) -> None:
        self.engine, self.mesh, self.context, self.pipeline = engine, mesh, context, pipeline
        self.loss, self.gathers, self.training = loss, gathers, training
        self._autocast = models.autocast(engine.plan, engine.world.device)
        self._exactly = self._compares_in_float32()
        self._seen_computations: set[tuple[str, ...]] = set()
        self._batch: Any = None
        self._num_compared = self._num_audits = 0
        self.has_new_computation = False
        """True once this rank has seen a loss whose computation was not compared."""

    def see_batch(self, batch: Batch) -> None:
        """Keep the batch; compare by the first one. Raises `RecipeError`."""
        self._batch = batch
        if not self._num_compared:
            self._compare()

    def see_loss(self, loss: Tensor) -> None:
        """Note the operations of a loss. Those of the first update count as compared."""
        operations = last_operations(loss)
        if operations not in self._seen_computations:
            self._seen_computations.add(operations)
            self.has_new_computation = self.has_new_computation or self._num_audits > 0

    def audit(self) -> None:
        """Compare again if a rank has seen a loss of other operations, at most about log2(number of
        audits) times.
        """
        has_new_computation = self._any(self.has_new_computation)
        self._num_audits += 1
        if has_new_computation and self._num_compared <= 1 + self._num_audits.bit_length():
            self.has_new_computation = False
            self._compare()

    def _compare(self) -> None:
        self._num_compared += 1
        found: Verdict | None = None
        for scale in SCALES:
            verdict = self._verdict(scale)
            if verdict is None:
                continue
            if verdict.agrees:
                return
            if found is not None:
                break
            found = verdict
        if found is not None:
            raise RecipeError(self._refusal(found))

    def _verdict(self, scale: float) -> Verdict | None:
        """Compare at moved weights; None if the whole model's gradient is not finite there."""
        engine, device = self.engine, self.engine.world.device
        batch = prefetch.move(self._batch, device)
        context = self.context
        whole, part = (batch, batch) if context is None else context.whole_and_part(batch)
        kept = partial(extra_state_kept, engine.module)
        once = eagerly() if engine.plan.compile else models.NO_CONTEXT
        with (
            once,
            engine.buffers.of_rank_0(),
            buffers_kept(engine.module),
            self._moved(scale),
        ):
            reference = self._whole_gradients if self.gathers else self._sequence_gradients
            training = self.training
            with kept():
                loss, expected, drawn = reference(whole, training)
            if self._any(training and drawn):  # parts and whole would draw different numbers
                training = False
                with kept():
                    loss, expected, _ = reference(whole, training)
            size = torch.stack([grad.double().square().sum() for grad in expected.values()])
            if self._any(not bool(torch.isfinite(size).all())):
                return None
            with kept(), repeatable_forward(engine.module, device, training):
                seen, gradients = self._partitioned_gradients(part)
        pairs = [
            torch.stack([(gradients[name].double() - grad.double()).square().sum(), square])
            for (name, grad), square in zip(expected.items(), size, strict=True)
        ]
        names = [name for name, _ in self._compared()]
        losses = self._losses(float(seen), float(loss))
        return judge(names, self._sum(pairs), losses, low=not self._exactly)

    # --- both ways ------------------------------------------------------------------------

    @contextmanager
    def _moved(self, scale: float) -> Iterator[None]:
        """Move all weights by the same numbers on all ranks; put them back bit for bit."""
        engine = self.engine
        engine.ready()
        seed = engine.plan.seed * 1_000_003 + round(scale * 10)
        kept = {name: part.clone() for name, part in self._own_parts()}
        parameters = dict(engine.module.named_parameters())
        numbers = {name: seed + 101 * index for index, name in enumerate(parameters)}
        for name, part in self._own_parts() if scale else ():
            noise = draw(parameters[name].shape, numbers[name], part.device, scale)
            part.add_(engine.own_of(name, parameters[name], noise))
        engine.ready()
        try:
            yield
        finally:
            engine.ready()
            # looked up again: the first forward may have given parts other memory
            for name, part in self._own_parts():
                part.copy_(kept[name])
            engine.ready()

    def _own_parts(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of each parameter that it holds."""
        for name, parameter in self._compared():
            if name not in self.engine.elsewhere:
                yield name, dtensor.own_part(parameter)

    def _whole_gradients(
        self, batch: Batch, training: bool
    ) -> tuple[Tensor, dict[str, Tensor], bool]:
        """Return the loss, this rank's part of the gradient, and whether it drew random numbers."""
        engine = self.engine
        parameters = dict(engine.module.named_parameters())
        with engine.full_params() as module:
            with (
                repeatable_forward(module, engine.world.device, training) as drew,
                self._whole_sequences(),
            ):
                with self._autocast(), self._in_float32(), self._mark_last_stage():
                    loss = self.loss(module, batch)
                check_loss(loss)
                drawn = drew()
                self._refuse_what_passes_stages(module, loss)
                stepping.backward(loss, torch.ones_like(loss))
            found = {}
            for name, whole in module.named_parameters():
                grad = torch.zeros_like(whole) if whole.grad is None else whole.grad
                whole.grad = None
                if whole.is_floating_point():
                    mean = self._mean(grad)
                    if name not in engine.elsewhere:
                        found[name] = engine.own_of(name, parameters[name], mean)
        return loss.detach(), self._fill_in(found), drawn

    def _sequence_gradients(
        self, batch: Batch, training: bool
    ) -> tuple[Tensor, dict[str, Tensor], bool]:
        """Return the same from the engine's own module: each rank computes whole sequences."""
        engine = self.engine
        with (
            repeatable_forward(engine.module, engine.world.device, training) as drew,
            self._whole_sequences(),
        ):
            loss, found = self._partitioned_gradients(batch)
            drawn = drew()
        # ranks that share sequences compute the same loss, not that of a part each
        number = self.engine.world.feeders_per_reader
        return loss, {name: grad / number for name, grad in found.items()}, drawn

    def _partitioned_gradients(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the partitioned model, and this rank's part of its gradient."""
        engine = self.engine
        with explain_mixed_tensors(), engine.microbatch(last=True):
            with engine.autocast(), self._in_float32():
                loss = self.loss(engine.module, batch)
            refuse_partitioned_loss(loss)
            check_loss(loss)
            stepping.backward(loss, torch.ones_like(loss))
        engine.complete_gradients()
        found = {
            name: dtensor.own_part(parameter.grad)
            for name, parameter in engine.module.named_parameters()
            if parameter.grad is not None
        }
        stepping.forget_gradients(engine.module.parameters())
        return loss.detach(), self._fill_in(found)

    def _fill_in(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Fill in all names, with zeros where this rank has no gradient, or no part."""
        return {
            name: torch.zeros_like(dtensor.own_part(parameter))
            if name in self.engine.elsewhere or name not in found
            else found[name].to(dtensor.own_part(parameter).device)
            for name, parameter in self._compared()
        }

    def _compared(self) -> Iterator[tuple[str, nn.Parameter]]:
        named = self.engine.module.named_parameters()
        return ((name, parameter) for name, parameter in named if parameter.is_floating_point())

    def _compares_in_float32(self) -> bool:
        """True if weights are, and travel, in float32 or more, whatever training computes in."""
        held = {each.dtype for _, each in self._compared()} | {gathered_dtype(self.engine.plan)}
        return all(torch.finfo(dtype).bits >= 32 for dtype in held)

    def _in_float32(self) -> AbstractContextManager[Any]:
        device = self.engine.world.device.type
        return torch.autocast(device, enabled=False) if self._exactly else nullcontext()

    @contextmanager
    def _whole_sequences(self) -> Iterator[None]:
        """Let each rank's attention see whole sequences of its own."""
        context = self.context
        with torch.enable_grad(), nullcontext() if context is None else context.whole_sequences():
            yield

    # --- over ranks -----------------------------------------------------------------------

    def _mean(self, gradient: Tensor) -> Tensor:
        """Average a gradient of the whole model over feeders."""
        world = self.engine.world
        if world.num_feeders > 1:
            gradient = gradient.contiguous()
            with naming_call("comparing gradients with whole ones", world.rank):
                dist.all_reduce(keep_for_a_while(gradient), group=self.mesh.feeders)
        return gradient / (world.num_feeders * world.feeders_per_reader)

    def _sum(self, pairs: Sequence[Tensor]) -> list[list[float]]:
        """Add up squares over all ranks. Replicated parts count equally often in both of a pair."""
        world = self.engine.world
        total = torch.stack(list(pairs)).to(world.device)
        with naming_call("comparing gradients with whole ones", world.rank):
            dist.all_reduce(keep_for_a_while(total))
        return cast("list[list[float]]", total.tolist())

    def _losses(self, seen: float, expected: float) -> list[list[float]]:
        """Gather each rank's losses of both models; losses of parts of a sequence are added."""
        world = self.engine.world
        own = torch.tensor([seen, expected], dtype=torch.float64, device=world.device)
        with naming_call("comparing losses", world.rank):
            if self.context is not None:
                part = own[:1].clone()
                dist.all_reduce(keep_for_a_while(part), group=self.context.group)
                own[:1] = part
            gathered = [torch.empty_like(own) for _ in range(world.size)]
            dist.all_gather(gathered, keep_for_a_while(own))
        return [each.tolist() for each in gathered]

    def _any(self, flag: bool) -> bool:
        world = self.engine.world
        found = torch.tensor(float(flag), device=world.device)
        with naming_call("comparing gradients with whole ones", world.rank):
            dist.all_reduce(keep_for_a_while(found), dist.ReduceOp.MAX)
        return bool(found)

    # --- what is wrong --------------------------------------------------------------------

    def _mark_last_stage(self) -> AbstractContextManager[None]:
        if self.pipeline is None:
            return nullcontext()
        return marked_inputs(self.pipeline.last_stage()[0], _LastStage)

    def _refuse_what_passes_stages(self, module: nn.Module, loss: Tensor) -> None:
        """Raise `RecipeError`, on all ranks, if the loss uses weights that the last stage does not
        have, even if they do not change it yet."""
        if self.pipeline is None:
            return
        _, held = self.pipeline.last_stage()
        names = {parameter: name for name, parameter in module.named_parameters()}
        wrong = sorted(reached(loss, names, name_of(_LastStage)) - held)
        if self._any(bool(wrong)):
            shown = ", ".join(wrong[:10]) or "weights that another rank names"
            size = self.mesh.shape.pipeline
            raise RecipeError(_PAST_THE_STAGES.format(size=size, names=shown))

    def _refusal(self, verdict: Verdict) -> str:
        shape = self.mesh.shape
        sizes = {name: getattr(shape, name) for name in _CAUSES}
        dimensions = " and ".join(f"backend.{name}={n}" for name, n in sizes.items() if n > 1)
        causes = ". ".join(cause for name, cause in _CAUSES.items() if sizes[name] > 1)
        seen, expected = verdict.losses
        largest = sorted(verdict.wrong.items(), key=lambda pair: -pair[1])[:5]
        gradients = ", ".join(f"{name} ({difference:.0%})" for name, difference in largest)
        detail = f"; gradients differ of {len(verdict.wrong)} weights, such as {gradients}"
        return (
            f"with {dimensions} the loss of a batch is {seen:.6g}, and by the whole model it is "
            f"{expected:.6g}{detail if largest else ''} (at weights that were moved a little for "
            f"the comparison). {causes}"
        )


class _LastStage(Mark):
    """Marks where the last stage begins."""

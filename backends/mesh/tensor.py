"""Tensor parallelism: layers that are partitioned over ranks, and checks of what they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...data.parallel import Parallel
from ...kernel.contract import World
from ...kernel.errors import CapabilityRefused, RecipeError
from ...kernel.plan import Plan
from ...kernel.recipe import Recipe
from ...kernel.shards import Piece, Reader
from ..common import models
from ..fsdp import dtensor
from ..fsdp.engine import FsdpEngine
from ..fsdp.partition import Partition
from ..process_group.collectives import keep_for_a_while, naming_collectives, ranks_exist
from .layers import Fused, ReorderedReader, partition_layers, sequence_modules, split, used_on_parts
from .logits import VocabParallelLoss, refuse_partitioned_loss
from .parts_in_loss import PartsInLoss
from .shape import Mesh

__all__ = ["TensorPartition"]

_PARTS_IN_LOSS = (
    "what Parallel.tensor computes in 'sequence' is added to the loss, such as an auxiliary loss "
    "of routers: each rank has its value for a part of the positions, and none for all. Leave it "
    "out of the loss, do without 'sequence', or set backend.tensor=1"
)


class TensorPartition(Partition):
    """Partitions the layers that the recipe names over the ranks of `mesh.tensor`."""

    def __init__(self, recipe: Recipe, plan: Plan, world: World, mesh: Mesh) -> None:
        self.plan, self.world, self.mesh = plan, world, mesh
        self.parallel = recipe.parallel or Parallel()
        self.fused = Fused(mesh.shape.tensor)
        self._names_on_parts: list[str] = []
        self._partitions_logits = "logits" in self.parallel.tensor.values()
        self._takes_turns = hasattr(recipe.loss, "of_update")
        self._num_completed: Counter[tuple[bool, ...]] = Counter()
        self._named = partial(naming_collectives, rank=world.rank)

    def partition_layers(self, engine: FsdpEngine) -> None:
        absent = {*engine.elsewhere.values()}
        self.fused = partition_layers(
            engine.module, self.parallel, self.mesh.tensor, engine.tied, absent
        )
        self._names_on_parts = used_on_parts(engine.module, self.parallel)

    def attach(self, engine: FsdpEngine) -> None:
        for kind in models.kinds_of(engine.optimizer) if self.fused.parts else ():
            if not dtensor.steps_parts(kind):
                raise CapabilityRefused(
                    f"the optimizer {type(kind).__name__} with Parallel.fused",
                    "mesh",
                    "it treats a matrix as more than its elements, and in memory the rows of these "
                    "weights lie in another order. Take one like torch.optim.AdamW, or "
                    "partition these layers by 'vocabulary'",
                )
        self.module = engine.module
        self._on_parts = [self.module.get_parameter(name) for name in self._names_on_parts]
        engine.loss_hooks.append(refuse_partitioned_loss)
        if parts := sequence_modules(self.module, self.parallel):
            marks = not self.plan.compile
            self._parts: PartsInLoss | None = PartsInLoss(parts, marks, self.mesh.tensor)
            self._sum_of_losses = torch.zeros((), dtype=torch.float64, device=self.world.device)
            """Sum since the last audit."""
            engine.loss_hooks.append(self._see_loss)
            engine.audit_hooks.append(self._compare_losses)

    # --- training ---------------------------------------------------------------------------

    def microbatch(self) -> AbstractContextManager[Any]:
        return VocabParallelLoss() if self._partitions_logits else nullcontext()

    def _see_loss(self, loss: Tensor) -> None:
        self._sum_of_losses += loss.detach()
        if self._parts is not None:
            self._refuse_parts(self._parts, loss)
            self._parts = None

    def _refuse_parts(self, parts: PartsInLoss, loss: Tensor) -> None:
        """Raise `RecipeError` if a rank's loss contains a term of its own positions alone."""
        gathered = self._gather_values(float(parts.reached(loss)), float(loss.detach()))
        if any(reached for reached, _ in gathered):
            raise RecipeError(_PARTS_IN_LOSS)
        if self.plan.compile:  # compiled code shows no marks
            self._refuse_different([seen for _, seen in gathered])

    def _refuse_different(self, losses: Sequence[float]) -> None:
        """Raise `RecipeError` unless ranks that partition the same layers have the same loss."""
        exact = self.plan.precision.compute == torch.float32
        of_groups = torch.tensor(losses, dtype=torch.float64).view(-1, self.mesh.shape.tensor)
        difference, largest = of_groups.amax(1) - of_groups.amin(1), of_groups.abs().amax(1)
        if bool((difference > (1e-5 if exact else 1e-3) * largest).any()):
            raise RecipeError(_PARTS_IN_LOSS)

    def _compare_losses(self) -> None:
        """Compare the losses since the last audit."""
        losses = [loss for (loss,) in self._gather_values(float(self._sum_of_losses))]
        self._sum_of_losses.zero_()
        self._refuse_different(losses)

    def _gather_values(self, *values: float) -> list[list[float]]:
        """Gather values from all ranks, so that all refuse, or none."""
        own = torch.tensor(values, dtype=torch.float64, device=self.world.device)
        gathered = [torch.empty_like(own) for _ in range(self.world.size)]
        with self._named("comparing losses"):
            dist.all_gather(gathered, keep_for_a_while(own))
        return [each.tolist() for each in gathered]

    def complete_gradients(self) -> None:
        self._add_up_parts()
        if ranks_exist():
            self._compare_replicas_when_due()

    def _add_up_parts(self) -> None:
        """Add up the gradients of weights that ranks use on parts of heads or positions."""
        if not (grads := dtensor.own_gradients(self._on_parts)):
            return
        total = torch.cat([grad.reshape(-1) for grad in grads]).to(self.world.device)
        with self._named("adding up gradients of what is computed on parts"):
            dist.all_reduce(keep_for_a_while(total), group=self.mesh.tensor.get_group())
        for grad, summed in zip(grads, torch.split(total, [g.numel() for g in grads]), strict=True):
            grad.copy_(summed.view_as(grad))

    def _compare_replicas_when_due(self) -> None:
        """Compare replicas at the 1st, 2nd, 4th, 8th update and so on, counted for each turn by
        itself.
        """
        turn: tuple[bool, ...] = ()
        if self._takes_turns:
            turn = tuple(parameter.requires_grad for parameter in self.module.parameters())
        self._num_completed[turn] += 1
        if self._num_completed[turn].bit_count() == 1:
            self._compare_replicas()

    def _compare_replicas(self) -> None:
        """Raise `RecipeError` for replicated weights whose gradients differ between ranks. Such a
        weight is used on a part of the positions or hidden units without being named in the plan.
        Its copies would drift apart.
        """
        names, sums = [], []
        for name, parameter in self.module.named_parameters():
            partitioned = isinstance(parameter, DTensor) and {"tensor", "expert"} & {
                *(parameter.device_mesh.mesh_dim_names or ())
            }
            if not partitioned and parameter.grad is not None:
                names.append(name)
                sums.append(dtensor.own_part(parameter.grad).double().abs().sum())
        if not sums:
            return
        own = torch.stack(sums).to(self.world.device)
        largest, smallest = own.clone(), own.clone()
        group = self.mesh.tensor.get_group()
        with self._named("comparing gradients of replicated weights"):
            dist.all_reduce(keep_for_a_while(largest), dist.ReduceOp.MAX, group=group)
            dist.all_reduce(keep_for_a_while(smallest), dist.ReduceOp.MIN, group=group)
        differ = ((largest - smallest) > 1e-3 * largest).tolist()
        if named := [name for name, differs in zip(names, differ, strict=True) if differs]:
            raise RecipeError(
                f"gradients of {', '.join(named[:10])} differ between ranks that hold the same: "
                "these weights are used on parts of positions or of hidden units. Name their "
                "modules in Parallel.tensor ('sequence' for what is computed between 'row' and "
                "'column', 'heads' for a normalisation between 'column' and 'row'), or set "
                "backend.tensor=1"
            )

    # --- saving and showing: rows of fused weights lie in another order in memory ------------

    def pieces(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            yield from split(piece, self.fused)

    def reader(self, reader: Reader) -> Reader:
        return ReorderedReader(reader, self.fused) if self.fused.parts else reader

    def whole(self, name: str, gathered: Tensor) -> Tensor:
        return self.fused.in_order(name, gathered) if name in self.fused.parts else gathered

    def as_held(self, name: str, whole: Tensor) -> Tensor:
        return self.fused.reordered(name, whole) if name in self.fused.parts else whole

    def own_parts(self, parts: Mapping[str, Any]) -> Mapping[str, Any]:
        fused = self.fused.parts
        return {name: (own, (box, fused.get(name))) for name, (own, box) in parts.items()}

"""The engine of the driver `mesh`: layers are cut, experts dealt, sequences taken in parts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ...data.parallel import Parallel
from ...kernel.contract import Outcome, World
from ...kernel.errors import CapabilityRefused, RecipeError
from ...kernel.plan import Plan
from ...kernel.recipe import Batch, Recipe
from ...kernel.shards import Piece, Reader
from ..common import models, prefetch
from ..fsdp import dtensor, sharding
from ..fsdp.driver import FsdpEngine
from ..process_group.collectives import keep_for_a_while
from .comparing import alike, evaluating, loss_to_compare
from .context import SequenceParts, WholeAttention
from .experts import Experts, find_experts
from .layers import Fused, InOrder, cut_layers, in_sequence, split, used_on_parts
from .logits import LossOfParts, require_whole
from .parts_in_loss import PartsInLoss
from .shape import Mesh

__all__ = ["MeshEngine"]

_LOG = logging.getLogger(__name__)

_MOST_COMPARED = 500_000_000
"""Parameters of a model that is gathered to compare its layers."""

_NOT_COMPARED = (
    "layers, experts and stages that are cut were not compared with whole ones: the model has %s "
    "parameters, and more than %s are not gathered for it. A smaller model of the same kind is"
)

_WHAT_MAY_BE_WRONG = {
    "expert": "Experts must treat each token by itself, whoever else goes to them, and find their "
    "number by their weights or by their module's num_experts",
    "pipeline": "From stage to stage goes the first argument of a block, and nothing else: neither "
    "what blocks keep for the loss, nor what passes them by. Name other blocks in Parallel.stages",
    "tensor": "Layers that are several in one, such as queries, keys and values, must be named in "
    "Parallel.fused, and what lies between 'column' and 'row' must take as many heads or units as "
    "it is given; with 'sequence' nothing may be added to the loss that is of a part of the "
    "positions, such as what routers say",
}
"""Where cut layers compute another loss than whole ones, by the dimension."""


class MeshEngine(FsdpEngine):
    """`FsdpEngine` over a part of the mesh, of layers that are cut over the rest."""

    def __init__(self, recipe: Recipe, plan: Plan, world: World, mesh: Mesh) -> None:
        self.mesh, self.parallel = mesh, recipe.parallel or Parallel()
        self.fused = Fused(mesh.shape.tensor)
        self.experts: Mapping[nn.Module, Experts] = {}
        self._names_on_parts: list[str] = []
        self.sequences: SequenceParts | None = None
        self._attention: AbstractContextManager[Any] = nullcontext()
        cuts_logits = mesh.shape.tensor > 1 and "logits" in self.parallel.tensor.values()
        self._losses = LossOfParts() if cuts_logits else nullcontext()
        if mesh.context is not None:
            self.sequences = SequenceParts(recipe, plan, mesh.context, world.device)
            self._attention = self.sequences.attention
        super().__init__(recipe, plan, world)
        kinds = models.kinds_of(self.optimizer) if self.fused.parts else ()
        for kind in kinds:
            if dtensor.steps_parts(kind):
                continue
            raise CapabilityRefused(
                f"the optimizer {type(kind).__name__} with Parallel.fused",
                "mesh",
                "it treats a matrix as more than its elements, and in memory the rows of these "
                "weights lie in another order. Take one like torch.optim.AdamW, or cut these "
                "layers by 'vocabulary'",
            )
        self._dealt = [p for module in self.experts for p in module.parameters()]
        self._on_parts = [self.module.get_parameter(name) for name in self._names_on_parts]
        self._replicas_compared = mesh.shape.tensor == 1
        self._parts: PartsInLoss | None = None
        if mesh.shape.tensor > 1 and (parts := in_sequence(self.module, self.parallel)):
            self._parts = PartsInLoss(parts, marks=not plan.compile)
        self.recipe = recipe
        self._compared_by = None
        if max(mesh.shape.tensor, mesh.shape.expert, mesh.shape.pipeline) > 1:
            self._compared_by = loss_to_compare(recipe, plan)
        if self._compared_by and self.num_parameters > _MOST_COMPARED:
            self._compared_by = None
            if world.leads:
                _LOG.warning(_NOT_COMPARED, self.num_parameters, _MOST_COMPARED)

    def build_model(self, recipe: Recipe) -> nn.Module:
        plan = dataclasses.replace(self.plan, activation_checkpointing=())
        module = models.build_model(recipe, plan, None)
        if self.mesh.expert is not None:  # what recomputes experts sends them their tokens again
            tensor = self.mesh.tensor if self.mesh.shape.tensor > 1 else None
            alike = None if "sequence" in self.parallel.tensor.values() else tensor
            found = find_experts(module, self.parallel, self.mesh.expert, alike)
            self.experts = {each.module: each for each in found}
        run = None if self.mesh.context is None else _recomputing(self.mesh.context)
        for pattern in self.plan.activation_checkpointing:
            models.recompute_activations(module, pattern, run)
        return module

    def choose_units(self) -> list[nn.Module]:
        inside = {part for module in self.experts for part in module.modules()}
        return [*self.experts, *(unit for unit in super().choose_units() if unit not in inside)]

    def compile(self, unit: nn.Module) -> None:
        if unit not in self.experts:  # what they compute depends on how many tokens they are given
            super().compile(unit)

    def cut_layers(self) -> Any:
        if self.mesh.shape.tensor > 1:
            self.fused = cut_layers(
                self.module,
                self.parallel,
                self.mesh.tensor,
                self.tied,
                absent={*self.elsewhere.values()},
            )
        for experts in self.experts.values():
            experts.cut({*self.elsewhere.values()})
        if self.mesh.shape.tensor > 1:
            self._names_on_parts = used_on_parts(self.module, self.parallel)
        return self.mesh.sharded

    def shard(self, unit: nn.Module, mesh: Any, ignored: set[nn.Parameter]) -> Any:
        if unit not in self.experts:
            return super().shard(unit, mesh, ignored)
        placement = self.experts[unit].placement(self.mesh.shape.num_cut_experts)
        return sharding.shard(unit, self.plan, self.mesh.experts_sharded, ignored, placement)

    def fed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """What this rank trains on of each batch. By the first one layers that are cut are compared
        with whole ones, and so are sequences."""
        for batch in batches:
            if self._compared_by is not None:
                self._compare_layers_with_whole(self._compared_by, batch)
                self._compared_by = None
            if self.sequences is not None:
                batch = self.sequences.part(batch, self.module, self.autocast)
            yield batch

    @torch.no_grad()
    def _compare_layers_with_whole(
        self, loss: Callable[[nn.Module, Batch], Tensor], batch: Batch
    ) -> None:
        """Raises `RecipeError` where they compute another loss."""
        batch, device = prefetch.move(batch, self.world.device), self.world.device
        once = torch.compiler.set_stance("force_eager") if self.plan.compile else nullcontext()
        with self.buffers.of_rank_0(), once:
            with evaluating(self.module, device), self.autocast(), _explaining_mixtures():
                cut = float(loss(self.module, batch))
            with self.full_params() as module, evaluating(module, device), self._autocast():
                whole = float(loss(module, batch))
        for seen, expected in self._of_all_ranks(cut, whole):
            if alike(seen, expected, self.plan):
                continue
            sizes = {name: getattr(self.mesh.shape, name) for name in _WHAT_MAY_BE_WRONG}
            asked = " and ".join(f"backend.{name}={n}" for name, n in sizes.items() if n > 1)
            causes = (cause for name, cause in _WHAT_MAY_BE_WRONG.items() if sizes[name] > 1)
            raise RecipeError(
                f"with {asked} the loss of the first batch is {seen:.6g}, and by whole layers it "
                f"is {expected:.6g} (in evaluation mode). {'. '.join(causes)}"
            )

    def _of_all_ranks(self, *values: float) -> list[list[float]]:
        """So that all refuse, or none."""
        own = torch.tensor(values, dtype=torch.float64, device=self.world.device)
        told = [torch.empty_like(own) for _ in range(self.world.size)]
        with self._named("comparing losses"):
            dist.all_gather(told, keep_for_a_while(own))
        return [each.tolist() for each in told]

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        with super().microbatch(last), self._attention, self._losses:
            yield

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        require_whole(loss)
        if self._parts is not None:
            self._refuse_parts(self._parts, loss)
            self._parts = None
        super().backward(loss, weight)

    def _refuse_parts(self, parts: PartsInLoss, loss: Tensor) -> None:
        """Raises `RecipeError` where a rank's loss has what is of its own positions alone."""
        told = self._of_all_ranks(float(parts.reached(loss)), float(loss.detach()))
        size, exact = self.mesh.shape.tensor, self.plan.precision.compute == torch.float32
        wrong = any(reached for reached, _ in told)
        if self.plan.compile:  # no mark is seen there
            losses = torch.tensor([seen for _, seen in told], dtype=torch.float64).view(-1, size)
            apart, most = losses.amax(1) - losses.amin(1), losses.abs().amax(1)
            wrong = bool((apart > (1e-5 if exact else 1e-3) * most).any())
        if wrong:
            raise RecipeError(
                "what Parallel.tensor computes in 'sequence' is added to the loss, such as what "
                "routers say: each rank has that of a part of the positions, and no rank all of "
                "it. Leave it out of the loss, do without 'sequence', or set backend.tensor=1"
            )

    def update(self) -> Outcome:
        self._add_up_parts()
        if not self._replicas_compared:
            self._compare_replicas()
            self._replicas_compared = True
        self._average_experts()
        return super().update()

    def _average_experts(self) -> None:
        """Their gradients are of the tokens of all ranks that they are dealt over, and were divided
        by the number of those that hold the same, not by that of feeders."""
        if grads := _grads_of(self._dealt):
            shape = self.mesh.shape
            torch._foreach_mul_(grads, shape.num_cut_experts / shape.num_cut)

    def _add_up_parts(self) -> None:
        """The gradients of weights that ranks use on parts of heads or positions."""
        if not (grads := _grads_of(self._on_parts)):
            return
        total = torch.cat([grad.reshape(-1) for grad in grads]).to(self.world.device)
        with self._named("adding up gradients of what is computed on parts"):
            dist.all_reduce(keep_for_a_while(total), group=self.mesh.tensor.get_group())
        for grad, summed in zip(grads, torch.split(total, [g.numel() for g in grads]), strict=True):
            grad.copy_(summed.view_as(grad))

    def _compare_replicas(self) -> None:
        """Raises `RecipeError` for weights that no layer cuts and whose gradients differ between
        ranks that hold the same: one that was used on a part of the positions, or of the hidden
        units, without being named. They would drift apart."""
        names, sums = [], []
        for name, parameter in self.module.named_parameters():
            cut = isinstance(parameter, DTensor) and {"tensor", "expert"} & {
                *(parameter.device_mesh.mesh_dim_names or ())
            }
            if not cut and parameter.grad is not None:
                names.append(name)
                sums.append(dtensor.own_part(parameter.grad).double().abs().sum())
        if not sums:
            return
        own = torch.stack(sums).to(self.world.device)
        most, least = own.clone(), own.clone()
        group = self.mesh.tensor.get_group()
        with self._named("comparing gradients of what no layer cuts"):
            dist.all_reduce(keep_for_a_while(most), dist.ReduceOp.MAX, group=group)
            dist.all_reduce(keep_for_a_while(least), dist.ReduceOp.MIN, group=group)
        differ = ((most - least) > 1e-3 * most).tolist()
        if named := [name for name, differs in zip(names, differ, strict=True) if differs]:
            raise RecipeError(
                f"gradients of {', '.join(named[:10])} differ between ranks that hold the same: "
                "these weights are used on parts of positions or of hidden units. Name their "
                "modules in Parallel.tensor ('sequence' for what is computed between 'row' and "
                "'column', 'heads' for a normalisation between 'column' and 'row'), or set "
                "backend.tensor=1"
            )

    def shards(self) -> Iterator[Piece]:
        for piece in super().shards():
            yield from split(piece, self.fused)

    def restore(self, reader: Reader) -> None:
        super().restore(InOrder(reader, self.fused) if self.fused.parts else reader)

    @contextmanager
    def full_params(self, names: Sequence[str] | None = None) -> Iterator[nn.Module]:
        with super().full_params(names) as module, ExitStack() as stack:
            for experts in self.experts.values():
                stack.enter_context(experts.undone())
            yield module

    def whole(self, name: str, parameter: nn.Parameter) -> Tensor:
        found = super().whole(name, parameter)
        return self.fused.in_order(name, found) if name in self.fused.parts else found

    def own_of(self, name: str, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        if name in self.fused.parts:
            whole = self.fused.reordered(name, whole)
        return super().own_of(name, parameter, whole)


@contextmanager
def _explaining_mixtures() -> Iterator[None]:
    """Of whole tensors and cut ones, at which torch stops."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise RecipeError(
            f"a layer that is cut computes with more than its weights and what it is given: "
            f"{error} What stands in for a layer, such as an adapter, may use nothing else (LoRA "
            "does not; DoRA does). Take another adapter, or set backend.tensor=1"
        ) from error


def _grads_of(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """This rank's parts of those that there are."""
    return [dtensor.own_part(p.grad) for p in parameters if p.grad is not None]


def _recomputing(group: Any) -> Callable[..., Any]:
    """Attention is over whole sequences the second time, too, in whichever thread that is."""

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), WholeAttention(group)

    def run(forward: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run

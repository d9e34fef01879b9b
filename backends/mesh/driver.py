"""Ranks in several dimensions: pipeline x replicate x shard x context x tensor.

Adds to `fsdp`, which shards along one dimension: sequences partitioned over ranks (`context`),
experts placed on different ranks (`expert`), partitioned layers (`tensor`), and blocks placed on
different ranks (`pipeline`). The recipe says how (`drivetrain.Parallel`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from ...data.parallel import Parallel
from ...kernel.contract import World
from ...kernel.errors import CapabilityRefused
from ...kernel.plan import Capabilities, Layout, Plan, Probe
from ...kernel.recipe import Batch, Recipe
from ...launched import world_size
from ..fsdp import sharding
from ..fsdp.driver import FOR_ACCELERATORS, FsdpDriver
from ..fsdp.engine import FsdpEngine
from ..fsdp.partition import Partition
from ..process_group.collectives import naming_collectives, ranks_exist
from ..process_group.session import ProcessGroupSession
from .audit import gradient_audit
from .context import ContextPartition
from .experts import ExpertPartition, plan_experts
from .layers import plan_layers
from .listing import shapes
from .pipeline import PipelinePartition, refuse_turns
from .schedule_runner import ScheduleRunner
from .shape import Mesh, MeshOptions, Shape, options_of
from .stages import Stages
from .tensor import TensorPartition

__all__ = ["MeshOptions", "driver"]

_OLDEST_SEEN = "2.15"
_NO_FLOAT8 = (
    "a card multiplies in float8 where 16 divides the sizes of its weights, and this is not "
    "checked for parts of layers. Set backend.tensor=1, or take precision=bf16"
)


class MeshDriver(FsdpDriver):
    """One process for each device, in a mesh of named dimensions."""

    name = "mesh"
    options_type: type[Any] = MeshOptions

    def probe(self) -> Probe:
        return dataclasses.replace(super().probe(), preference=-3)

    def capabilities(self, plan: Plan) -> Capabilities:
        options = options_of(plan)
        num_sharing = options.context * options.tensor * (options.shard or 1)
        num_groups = options.min_ranks // num_sharing
        found = super().capabilities(plan)
        why_not = {**found.why_not, "multiple_of_ranks": f"with {options.description}"}
        if options.tensor > 1:
            found = dataclasses.replace(found, precisions=found.precisions - {"float8"})
            why_not["float8"] = _NO_FLOAT8
        return dataclasses.replace(
            found,
            # recomputed layers would be traced as if their sequences were whole
            compile=options.context == 1 and (options.tensor == 1 or _is_new_torch()),
            static_shapes=options.pipeline > 1,
            multiple_of_ranks=num_groups * math.lcm(num_sharing, options.expert),
            why_not=why_not,
        )

    def num_parts(self, options: Any, world_size: int) -> int:
        sizes: MeshOptions = options
        if sizes.shard is not None:
            return sizes.shard * sizes.context
        return max(1, world_size // ((sizes.replicate or 1) * sizes.tensor * sizes.pipeline))

    def list_options(self, recipe: Recipe, world_size: int) -> Iterator[Mapping[str, Any]]:
        """See `ListsOptions`: meshes with other dimensions than those of `fsdp`. Gradients are
        summed at each microbatch, since a mesh is for models that need its memory."""
        for sizes in shapes(recipe, world_size):
            yield {**FOR_ACCELERATORS, **sizes, "sync_each_microbatch": True}

    def layout(
        self, plan: Plan, model: nn.Module, state_bytes: Mapping[str, int], world_size: int
    ) -> Layout:
        found = super().layout(plan, model, state_bytes, world_size)
        notes = {"tensor": "layers", "pipeline": "blocks"}
        return dataclasses.replace(
            found,
            notes=(
                *found.notes,
                *(
                    f"{what} are counted as if backend.{name} were 1"
                    for name, what in notes.items()
                    if getattr(options_of(plan), name) > 1
                ),
            ),
        )

    def check_model(self, model: nn.Module, recipe: Recipe, plan: Plan) -> None:
        """Check that patterns match, and that sizes divide. See `ChecksModels`."""
        options, parallel = options_of(plan), recipe.parallel or Parallel()
        if options.expert > 1:
            plan_experts(model, parallel, options.expert)
        if options.pipeline > 1:
            refuse_turns(recipe)
            Stages(model, parallel.stages, options.num_stages)
        if options.tensor > 1:
            plan_layers(model, parallel, options.tensor)

    @contextmanager
    def open(self, plan: Plan) -> Iterator[ProcessGroupSession]:
        shape = Shape.of(options_of(plan), world_size())
        if shape.pipeline > 1 and not _is_new_torch():
            raise CapabilityRefused(
                f"backend.pipeline={shape.pipeline}",
                self.name,
                f"this is torch {torch.__version__}, and the schedules of pipelines were not seen "
                f"to compute what they should before {_OLDEST_SEEN}. Take that, or set "
                "backend.pipeline=1",
            )
        if shape.tensor > 1 and plan.compile:
            plan = _compiled_by_shape(plan)
        with sharding.opened(plan) as world:
            with naming_collectives("creating the groups of the mesh", world.rank, patient=True):
                mesh = Mesh(shape, world.device)
            yield MeshSession(plan, shape.world(world), mesh)


def _is_new_torch() -> bool:
    """Return True if torch is new enough for pipelines and for compiled layers that are
    partitioned; older versions are untested.
    """
    return TorchVersion(torch.__version__) >= _OLDEST_SEEN


def _compiled_by_shape(plan: Plan) -> Plan:
    """Compile for fixed shapes: torch 2.15 fails to compile partitioned layers for sequences of any
    length.
    """
    if plan.compile_options.get("dynamic"):
        raise CapabilityRefused(
            "compile_options['dynamic']=True with backend.tensor",
            "mesh",
            "partitioned layers are compiled again for each shape. Leave dynamic out, and pad "
            "sequences to few lengths; or set compile=false",
        )
    return dataclasses.replace(plan, compile_options={**plan.compile_options, "dynamic": False})


class MeshSession(ProcessGroupSession):
    """A session in which ranks that share sequences receive a part of each."""

    def __init__(self, plan: Plan, world: World, mesh: Mesh) -> None:
        super().__init__(plan, world, self._engine_of)
        self.mesh, self.feeders = mesh, mesh.feeders
        self._engine: FsdpEngine | None = None

    def _engine_of(self, recipe: Recipe, plan: Plan, world: World) -> FsdpEngine:
        self._engine, self._parts_of = parallelize(recipe, plan, world, self.mesh)
        return self._engine

    def feed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        if self._engine is not None and self._engine.module.training:
            batches = self._parts_of(batches)
        return super().feed(batches)


def parallelize(
    recipe: Recipe, plan: Plan, world: World, mesh: Mesh
) -> tuple[FsdpEngine, Callable[[Iterator[Batch]], Iterator[Batch]]]:
    """Return an engine that partitions the model over a mesh, and a function that yields the part
    of each batch that this rank trains on.
    """
    shape, parallel = mesh.shape, recipe.parallel or Parallel()
    context = pipeline = None
    partitions: list[Partition] = []
    if shape.tensor > 1:
        partitions.append(TensorPartition(recipe, plan, world, mesh))
    if shape.expert > 1:
        partitions.append(ExpertPartition(parallel, mesh))
    if mesh.context is not None:
        partitions.append(context := ContextPartition(parallel, mesh.context))
    if shape.pipeline > 1:
        refuse_turns(recipe)
        if not ranks_exist():
            raise CapabilityRefused(
                "a pipeline whose other ranks do not exist",
                "mesh",
                "a stage learns from the one before what it receives",
            )
        partitions.append(pipeline := PipelinePartition(parallel, plan, world, mesh))
    engine = FsdpEngine(recipe, plan, world, "mesh", partitions, mesh.sharded, mesh.stage)
    if pipeline is not None and recipe.step is None:
        engine.step = ScheduleRunner(recipe, engine, pipeline).step
    audit = gradient_audit(recipe, engine, mesh, context, pipeline)
    if audit is not None:
        engine.loss_hooks.append(audit.see_loss)
        engine.audit_hooks.append(audit.audit)

    def parts_of(batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            if audit is not None:  # compares by the first batch
                audit.see_batch(batch)
            yield batch if context is None else context.part(batch)

    return engine, parts_of


driver = MeshDriver()

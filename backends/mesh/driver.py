"""Ranks in several dimensions: pipeline x replicate x shard x context x tensor.

What `fsdp` does along one dimension, with sequences cut over ranks (`context`), experts dealt over
them (`expert`), layers cut (`tensor`), and blocks dealt over ranks (`pipeline`) on top. The recipe
says how (`drivetrain.Parallel`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
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
from ..fsdp import sharding
from ..fsdp.driver import FsdpDriver
from ..process_group.session import ProcessGroupSession, num_launched
from .engine import MeshEngine
from .experts import plan_experts
from .flights import FlyingEngine
from .layers import plan_layers
from .pipeline import refuse_turns
from .shape import Mesh, MeshOptions, Shape, options_of
from .stages import Stages

__all__ = ["MeshOptions", "driver"]

_OLDEST_SEEN = "2.15"
_OF_PARTS = (
    "a card multiplies in it where 16 divides the sizes of what it holds, and that of the parts of "
    "layers is not looked after. Set backend.tensor=1, or take precision=bf16"
)


class MeshDriver(FsdpDriver):
    """One process for each device, in a mesh of named dimensions."""

    name = "mesh"
    options_type: type[Any] = MeshOptions

    def probe(self) -> Probe:
        return dataclasses.replace(super().probe(), preference=-3)

    def capabilities(self, plan: Plan) -> Capabilities:
        options = options_of(plan)
        dealt = options.context * options.tensor * (options.shard or 1)
        copies = options.least_ranks // dealt
        able = super().capabilities(plan)
        why_not = {**able.why_not, "multiple_of_ranks": f"with {options.in_words}"}
        if options.tensor > 1:
            able = dataclasses.replace(able, precisions=able.precisions - {"float8"})
            why_not["float8"] = _OF_PARTS
        return dataclasses.replace(
            able,
            # what a model recomputes is traced as if its sequences were whole
            compile=options.context == 1 and (options.tensor == 1 or _is_new_torch()),
            static_shapes=options.pipeline > 1,
            multiple_of_ranks=copies * math.lcm(dealt, options.expert),
            why_not=why_not,
        )

    def num_parts(self, options: Any, world_size: int) -> int:
        asked: MeshOptions = options
        if asked.shard is not None:
            return asked.shard * asked.context
        return max(1, world_size // ((asked.replicate or 1) * asked.tensor * asked.pipeline))

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
        """See `recipe_checks.ChecksModels`: what patterns fit, and what has to divide."""
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
        shape = Shape.of(options_of(plan), num_launched())
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
            yield MeshSession(plan, shape.world(world), Mesh(shape, world.device))


def _is_new_torch() -> bool:
    """What pipelines, and compiled layers that are cut, need was not tried with older ones."""
    return TorchVersion(torch.__version__) >= _OLDEST_SEEN


def _compiled_by_shape(plan: Plan) -> Plan:
    """torch 2.15 fails to compile layers that are cut for sequences of any length."""
    if plan.compile_options.get("dynamic"):
        raise CapabilityRefused(
            "compile_options['dynamic']=True with backend.tensor",
            "mesh",
            "layers that are cut are compiled anew for each shape. Leave dynamic out, and pad "
            "sequences to few lengths; or set compile=false",
        )
    return dataclasses.replace(plan, compile_options={**plan.compile_options, "dynamic": False})


class MeshSession(ProcessGroupSession):
    """Ranks that share sequences get parts of them."""

    def __init__(self, plan: Plan, world: World, mesh: Mesh) -> None:
        super().__init__(plan, world, self._engine_of)
        self.mesh, self.feeders = mesh, mesh.feeders
        self._engine: MeshEngine | None = None

    def _engine_of(self, recipe: Recipe, plan: Plan, world: World) -> MeshEngine:
        kind = FlyingEngine if self.mesh.shape.pipeline > 1 else MeshEngine
        self._engine = kind(recipe, plan, world, self.mesh)
        return self._engine

    def feed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        if self._engine is not None and self._engine.module.training:
            batches = self._engine.fed(batches)
        return super().feed(batches)


driver = MeshDriver()

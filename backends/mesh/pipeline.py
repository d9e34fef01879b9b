"""Blocks that are placed on different ranks: each rank computes its stages, and sends activations
on.

A rank has placeholders for the weights of other stages: zeros that take no memory. So names,
shapes, the optimizer's groups and the model's own forward are the same on all ranks. Outside of
training steps the module is called as usual: ranks compute one after the other, and all receive the
model's return value. In a step, microbatches are in flight at once (see `flights`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...checkpoint.extra_state import extra_key
from ...data.parallel import Parallel
from ...kernel.contract import World
from ...kernel.errors import CapabilityRefused, RecipeError
from ...kernel.plan import Plan
from ...kernel.recipe import Recipe
from ...kernel.shards import Piece
from ..common import models, random_state
from ..common.buffers import buffers_kept, write_unseen
from ..fsdp import dtensor, meta_init
from ..fsdp.engine import FsdpEngine
from ..fsdp.partition import Partition
from ..process_group.collectives import keep_for_a_while, naming_collectives
from .p2p import PipelineP2P
from .schedules import ActivationShape
from .shape import Mesh, options_of
from .stages import StageForward, Stages, original_forward, placeholder

__all__ = ["PipelinePartition", "StageRun", "refuse_turns"]


def refuse_turns(recipe: Recipe) -> None:
    """Raise `CapabilityRefused` for a recipe whose updates take turns."""
    if hasattr(recipe.loss, "of_update"):
        raise CapabilityRefused(
            "losses that take turns (Turns) with backend.pipeline",
            "mesh",
            "stages are made of one model, which each update trains. Set backend.pipeline=1",
        )


@dataclass
class StageRun:
    """One microbatch in one stage, run by a schedule."""

    stage: int
    received: Tensor | None
    weighted_loss: Any = None
    """Set once the loss is known, in the last stage."""
    called: bool = False

    def take_received(self) -> Tensor | None:
        """Return the received activation. Raises `RecipeError` on the second call."""
        if self.called:
            raise RecipeError(
                "recipe.loss calls the module more than once: with backend.pipeline it may call "
                "it once. Join what it is called with into one batch, give the recipe a step of "
                "its own, in which microbatches go one after the other, or set backend.pipeline=1"
            )
        self.called = True
        return self.received


class PipelinePartition(Partition):
    """Places the blocks of a model on the ranks of `mesh.pipeline`."""

    can_be_undone = False
    running: StageRun | None = None
    """The microbatch that a schedule runs; None: a call of the module runs all stages in turn."""

    def __init__(self, parallel: Parallel, plan: Plan, world: World, mesh: Mesh) -> None:
        self.parallel, self.plan, self.world, self.mesh = parallel, plan, world, mesh
        self.p2p = PipelineP2P(mesh.pipeline.get_group(), world.device, mesh.tensor)
        self._named = functools.partial(naming_collectives, rank=world.rank)

    # --- set-up -----------------------------------------------------------------------------

    def choose_units(self, module: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
        self.stages = Stages(module, self.parallel.stages, options_of(self.plan).num_stages)
        self._blocks = {module.get_submodule(name) for name in self.stages.blocks}
        self.own_stages = range(self.p2p.index, self.stages.number, self.p2p.size)
        self.shapes: list[Any] = [None] * self.stages.number
        """Shapes of the activations in the last forward, by the stage that returns them."""
        self.holders = self.stages.holders(module)
        own = {p for p, stages in self.holders.items() if stages & {*self.own_stages}}
        return [unit for unit in units if own & {*unit.parameters()}]

    def to_compile(self, part: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks of a unit, where it has some: a forward that is left midway cannot be
        traced.
        """
        inside = [each for each in part.modules() if each in self._blocks]
        return inside or [part]

    def partition_layers(self, engine: FsdpEngine) -> None:
        """Replace the weights that other ranks hold by placeholders."""
        empty = {
            parameter: placeholder(parameter, self.world.device)
            for parameter, stages in self.holders.items()
            if not stages & {*self.own_stages}
        }
        named = dict(engine.module.named_parameters())
        engine.elsewhere = {name: empty[p] for name, p in named.items() if p in empty}
        self.held_by = {name: self.holders[parameter] for name, parameter in named.items()}
        meta_init.replace(engine.module, empty)

    def num_holders(self, name: str) -> int:
        return self.mesh.stage.size * len(self._holders_of(name))

    def attach(self, engine: FsdpEngine) -> None:
        for kind in models.kinds_of(engine.optimizer):
            if not dtensor.steps_tensors(kind):
                raise CapabilityRefused(
                    f"the optimizer {type(kind).__name__} with backend.pipeline",
                    "mesh",
                    "it is not known to treat each tensor by itself, and no rank has all of them. "
                    "Take one of torch's, such as torch.optim.AdamW",
                )
        self._groups_of_tied = self._tied_between_stages()
        self.module, self.elsewhere = engine.module, engine.elsewhere
        self._own_forward = self.module.__dict__.get("forward")
        self._forward = self.module.forward
        self.stage_forward = StageForward(self.module, self.stages, self.own_stages)
        self.module.forward = self._pipeline_forward
        self._returned = False
        self.module.register_forward_hook(self._note_return)

    def _holders_of(self, name: str) -> list[int]:
        """Return which ranks of the pipeline hold a parameter."""
        return sorted({stage % self.p2p.size for stage in self.held_by[name]})

    def _tied_between_stages(self) -> dict[str, Any]:
        """Return the process group of each parameter that several ranks of the pipeline have."""
        found: dict[str, Any] = {}
        groups: dict[tuple[int, ...], Any] = {}
        num_pipelines = self.mesh.stage.size
        for name in self.held_by:
            holders = tuple(self._holders_of(name))
            if len(holders) == 1:
                continue
            if holders not in groups:
                ranks = [[i * num_pipelines + n for i in holders] for n in range(num_pipelines)]
                output = [dist.new_group(each) for each in ranks]  # every rank must make all groups
                groups[holders] = output[self.world.rank % num_pipelines]
            if self.p2p.index in holders:
                found[name] = groups[holders]
        return found

    # --- computing --------------------------------------------------------------------------

    def _pipeline_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward that replaces the model's: all ranks of the pipeline receive its return value."""
        if (run := self.running) is not None:
            return self._compute_stage(run.stage, run.take_received(), *args, **kwargs)
        if kwargs.get("past_key_values") is not None:
            raise RecipeError(
                "keys and values of earlier calls (past_key_values) with backend.pipeline: each "
                "stage keeps those of its own blocks, and by the others' the model counts "
                "positions. Call generate with use_cache=False, or set backend.pipeline=1"
            )
        p2p = self.p2p
        output: Any = None
        for stage in self.own_stages:
            received = p2p.receive_activation(output) if stage else None
            output = self._compute_stage(stage, received, *args, **kwargs)
        if p2p.index < p2p.size - 1:
            return p2p.receive_output(output)
        p2p.broadcast(output)
        return output

    def _compute_stage(self, stage: int, received: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """Compute a stage of the model's forward. In training each stage draws other dropout masks.
        All ranks of the pipeline continue with the same random state: they see the same samples.
        """
        seed: AbstractContextManager[Any] = nullcontext()
        if self.module.training:
            seed = random_state.seeded(random_state.drawn_seed() + stage, self.world.device)
        with seed:
            output = self.stage_forward.run(stage, received, self._forward, *args, **kwargs)
        if received is not None:
            self.shapes[stage - 1] = ActivationShape(received.shape, received.dtype)
        if stage < self.stages.number - 1:
            self.shapes[stage] = ActivationShape(output.shape, output.dtype)
        return output

    @contextmanager
    def forward(self, autocast: AbstractContextManager[Any]) -> Iterator[None]:
        self._returned = False
        with autocast:
            try:
                yield
            except (TypeError, AttributeError, KeyError) as error:
                if not self._returned:
                    raise
                raise RecipeError(
                    f"recipe.loss failed after the model's forward ({type(error).__name__}: "
                    f"{error}). With backend.pipeline it may use what the model returns: what "
                    "blocks of other stages keep for it, such as an auxiliary loss, never arrives. "
                    "Let the model return all of it, or set backend.pipeline=1"
                ) from error

    def _note_return(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that the model's forward has returned: later failures are those of the loss."""
        self._returned = True

    def last_stage(self) -> tuple[nn.Module, frozenset[str]]:
        """Return the module at which the last stage begins, and the parameters that it holds."""
        last = self.stages.number - 1
        first = self.module.get_submodule(self.stages.blocks[self.stages.starts[last]])
        return first, frozenset(name for name, held in self.held_by.items() if last in held)

    def complete_gradients(self) -> None:
        wrong = [name for name, each in self.elsewhere.items() if each.grad is not None]
        if wrong:
            raise RecipeError(
                f"{', '.join(wrong[:10])} reached the loss on rank {self.world.rank}, which does "
                "not hold it: a weight outside of blocks belongs to the stage of the block before "
                "it in the model's order, or to the first, and no other stage may use it. Move it "
                "to the stage that uses it, or set backend.pipeline=1"
            )
        with self._named("adding up gradients of tied weights"):
            self._add_up_tied()

    def _add_up_tied(self) -> None:
        for name, group in self._groups_of_tied.items():
            parameter = self.module.get_parameter(name)
            part = dtensor.own_part(parameter)
            grad = parameter.grad
            own = torch.zeros_like(part) if grad is None else dtensor.own_part(grad)
            has_grad = own.new_full((1,), float(grad is not None))
            total = keep_for_a_while(torch.cat([own.reshape(-1), has_grad]))
            dist.all_reduce(total, group=group)
            if grad is not None:
                own.copy_(total[:-1].view_as(own))
            elif total[-1]:
                summed = total[:-1].view_as(part).clone()
                if isinstance(parameter, DTensor):
                    summed = dtensor.sharded_like(parameter, summed)
                parameter.grad = summed

    def unused(self, names: Sequence[str]) -> Sequence[str]:
        of_ranks: list[Any] = [None] * self.p2p.size
        with self._named("comparing weights without a gradient"):
            dist.all_gather_object(of_ranks, list(names), group=self.p2p.group)
        without = Counter(name for names in of_ranks for name in names)
        # a parameter of several stages is used if one of them has a gradient
        return [n for n in self.held_by if without[n] == len(self._holders_of(n))]

    # --- saving and showing -----------------------------------------------------------------

    def pieces(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        return filter(self._saves, pieces)

    def _saves(self, piece: Piece) -> bool:
        """Return True if this rank saves the piece. The first rank of the pipeline that holds its
        parameter or buffer does, and the first of all for other pieces.
        """
        name, index = piece.name, self.p2p.index
        if piece.kind == "optimizer":
            name = next((fqn for fqn in _prefixes(name) if fqn in self.held_by), "")
        if piece.kind == "state":
            if (key := extra_key(name)) is not None:
                return self.stages.of_module(key.rpartition(".")[0]) % self.p2p.size == index
            name = name.rpartition("/")[-1]  # a buffer of one rank's own
        if name in self.held_by:
            return self._holders_of(name)[0] == index
        return self.stages.of.get(name, 0) % self.p2p.size == index

    @contextmanager
    def full_params(self, module: nn.Module) -> Iterator[None]:
        originals = self.stage_forward.original_forwards()
        with buffers_kept(module), original_forward(module, self._own_forward), originals:
            self._broadcast_buffers()
            yield

    def whole(self, name: str, gathered: Tensor) -> Tensor:
        found = keep_for_a_while(gathered.to(self.world.device).contiguous())
        source = self.p2p.ranks[self._holders_of(name)[0]]
        with self._named("taking over the weights of other stages"):
            dist.broadcast(found, source, group=self.p2p.group)
        return found

    def _broadcast_buffers(self) -> None:
        """Give each buffer the value of the first rank of its stage."""
        with self._named("taking over the buffers of other stages"):
            for name, buffer in self.module.named_buffers():
                value = keep_for_a_while(buffer.detach().clone().contiguous())
                source = self.p2p.ranks[self.stages.of[name] % self.p2p.size]
                dist.broadcast(value.view(-1).view(torch.uint8), source, group=self.p2p.group)
                write_unseen([buffer], [value])


def _prefixes(name: str) -> Iterator[str]:
    """Yield the part of the name before each slash."""
    return (name[:index] for index, char in enumerate(name) if char == "/")

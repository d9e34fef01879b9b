"""Blocks that are dealt over ranks: each computes its stage, and hands activations on.

A rank that has none of a weight has zeros in its place that take no memory, so that names, shapes,
the optimizer's groups and the model's own forward are the same on all. Outside of training steps
the module is called as it ever was: ranks compute one after the other, and all get the answer. In
a step, microbatches are in flight at once (see `flights`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...kernel.contract import Outcome, World
from ...kernel.errors import CapabilityRefused, RecipeError
from ...kernel.plan import Plan
from ...kernel.recipe import Recipe
from ...kernel.shards import Piece
from ..common import models, random_state
from ..common.buffers import write_unseen
from ..fsdp import dtensor, meta_init
from ..process_group.collectives import keep_for_a_while
from ..process_group.layers_used import LayersUsed
from ..process_group.peers import Peers
from .engine import MeshEngine
from .line import Line
from .shape import Mesh, options_of
from .stages import StageForward, Stages, hollow

__all__ = ["PipelineEngine", "refuse_turns"]


def refuse_turns(recipe: Recipe) -> None:
    """Raises `CapabilityRefused` for updates that train a model each."""
    if hasattr(recipe.loss, "of_update"):
        raise CapabilityRefused(
            "losses that take turns (Turns) with backend.pipeline",
            "mesh",
            "stages are made of one model, which each update trains. Set backend.pipeline=1",
        )


class PipelineEngine(MeshEngine):
    """`MeshEngine` of one rank's stages."""

    def __init__(self, recipe: Recipe, plan: Plan, world: World, mesh: Mesh) -> None:
        refuse_turns(recipe)
        self.line = Line(mesh.pipeline.get_group(), world.device, mesh.tensor)
        self.elsewhere: dict[str, nn.Parameter] = {}
        super().__init__(recipe, plan, world, mesh)
        for kind in models.kinds_of(self.optimizer):
            if not dtensor.steps_tensors(kind):
                raise CapabilityRefused(
                    f"the optimizer {type(kind).__name__} with backend.pipeline",
                    "mesh",
                    "it is not known to treat each tensor by itself, and no rank has all of them. "
                    "Take one of torch's, such as torch.optim.AdamW",
                )
        self._groups_of_tied = self._tied_between_stages()
        self._own_forward = {k: v for k, v in vars(self.module).items() if k == "forward"}
        self._forward = self.module.forward
        self.stage_forward = StageForward(self.module, self.stages, self.own_stages)
        self.module.forward = self.called

    # --- what is where ----------------------------------------------------------------------

    def peers_in(self, world: World) -> Peers:
        return self.mesh.stage

    def notes(self) -> LayersUsed:
        return LayersUsed(self.world, self.line.size)

    def choose_units(self) -> list[nn.Module]:
        options = options_of(self.plan)
        self.stages = Stages(self.module, self.parallel.stages, options.num_stages)
        self.own_stages = range(self.line.place, self.stages.number, self.line.size)
        self.holders = self.stages.holders(self.module)
        own = {p for p, stages in self.holders.items() if stages & {*self.own_stages}}
        units = super().choose_units()
        return [unit for unit in units if own & {*unit.parameters()}]

    def compile(self, unit: nn.Module) -> None:
        """Its blocks, where it has some: a forward that is left on its way is not traced."""
        inside = {*unit.modules()}
        blocks = [self.module.get_submodule(name) for name in self.stages.blocks]
        for part in [block for block in blocks if block in inside] or [unit]:
            super().compile(part)

    def cut_layers(self) -> Any:
        """Let go of what other ranks have."""
        empty = {
            parameter: hollow(parameter, self.world.device)
            for parameter, stages in self.holders.items()
            if not stages & {*self.own_stages}
        }
        self.elsewhere = {
            name: empty[parameter]
            for name, parameter in self.module.named_parameters()
            if parameter in empty
        }
        self.held_by = {
            name: self.holders[parameter] for name, parameter in self.module.named_parameters()
        }
        meta_init.replace(self.module, empty)
        mesh = super().cut_layers()
        self.elsewhere = {name: self.module.get_parameter(name) for name in self.elsewhere}
        return mesh

    def num_replicas(self, name: str, parameter: nn.Parameter) -> int:
        ranks = self.peers.size * len(self._places_of(name))
        return dtensor.num_replicas(parameter, ranks) if isinstance(parameter, DTensor) else ranks

    def _places_of(self, name: str) -> list[int]:
        """In the line, of the ranks that have that parameter."""
        return sorted({stage % self.line.size for stage in self.held_by[name]})

    def _tied_between_stages(self) -> dict[str, Any]:
        """Of each parameter that several ranks of the line have: the process group of these."""
        found: dict[str, Any] = {}
        groups: dict[tuple[int, ...], Any] = {}
        lines = self.world.size // self.line.size
        for name in self.held_by:
            places = tuple(self._places_of(name))
            if len(places) == 1:
                continue
            if places not in groups:
                ranks = [[place * lines + n for place in places] for n in range(lines)]
                made = [dist.new_group(each) for each in ranks]  # by all ranks, of all
                groups[places] = made[self.world.rank % lines]
            if self.line.place in places:
                found[name] = groups[places]
        return found

    # --- computing --------------------------------------------------------------------------

    def called(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the model's forward: all ranks of the line get what it returns."""
        if kwargs.get("past_key_values") is not None:
            raise RecipeError(
                "keys and values of earlier calls (past_key_values) with backend.pipeline: each "
                "stage keeps those of its own blocks, and by the others' the model counts "
                "positions. Call generate with use_cache=False, or set backend.pipeline=1"
            )
        line = self.line
        made: Any = None
        for stage in self.own_stages:
            received = None
            if stage:
                received = line.receive() if made is None else line.exchange(made)
            made = self.compute(stage, received, *args, **kwargs)
        if line.place < line.size - 1:
            return line.answer(made)
        line.tell(made)
        return made

    def compute(self, stage: int, received: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """A stage of the model's forward. In training no two stages drop the same activations, and
        all ranks of the line go on with the same random numbers, since they see the same samples.
        """
        run = functools.partial(self.stage_forward.run, stage, received, self._forward)
        if not self.module.training:
            return run(*args, **kwargs)
        with random_state.seeded(random_state.drawn_seed() + stage, self.world.device):
            return run(*args, **kwargs)

    def unused(self) -> Sequence[str]:
        told: list[Any] = [None] * self.line.size
        with self._named("telling of weights without a gradient"):
            dist.all_gather_object(told, list(super().unused()), group=self.line.group)
        found = {name for names in told for name in names}
        return [name for name in self.held_by if name in found]

    def update(self) -> Outcome:
        wrong = [name for name, each in self.elsewhere.items() if each.grad is not None]
        if wrong:
            raise RecipeError(
                f"{', '.join(wrong[:10])} reached the loss on rank {self.world.rank}, where it is "
                "not: a weight that is in no block belongs to the block before it in the model's "
                "order, or the first, and may be used in no other stage. Let the model have it "
                "there, or set backend.pipeline=1"
            )
        with self._named("adding up gradients of tied weights"):
            self._add_up_tied()
        return super().update()

    def _add_up_tied(self) -> None:
        for name, group in self._groups_of_tied.items():
            parameter = self.module.get_parameter(name)
            part = dtensor.own_part(parameter)
            grad = parameter.grad
            own = torch.zeros_like(part) if grad is None else dtensor.own_part(grad)
            there = own.new_full((1,), float(grad is not None))
            total = keep_for_a_while(torch.cat([own.reshape(-1), there]))
            dist.all_reduce(total, group=group)
            if grad is not None:
                own.copy_(total[:-1].view_as(own))
            elif total[-1]:
                summed = total[:-1].view_as(part).clone()
                if isinstance(parameter, DTensor):
                    summed = dtensor.cut_like(parameter, summed)
                parameter.grad = summed

    # --- saving and showing -----------------------------------------------------------------

    def shards(self) -> Iterator[Piece]:
        for piece in super().shards():
            if self._writes(piece):
                yield piece

    def _writes(self, piece: Piece) -> bool:
        """The first stage that has it; what belongs to no parameter is the first rank's."""
        name = piece.name
        if piece.kind == "optimizer":
            name = next((fqn for fqn in _prefixes(name) if fqn in self.held_by), "")
        if piece.kind == "state":  # a buffer of one rank's own
            name = name.rpartition("/")[-1]
        if name in self.held_by:
            return self._places_of(name)[0] == self.line.place
        return self.stages.of.get(name, 0) % self.line.size == self.line.place

    @contextmanager
    def full_params(self, names: Sequence[str] | None = None) -> Iterator[nn.Module]:
        with super().full_params(names) as module, self._buffers_of_owners():
            del module.forward
            if "forward" in self._own_forward:
                module.forward = self._own_forward["forward"]
            try:
                with self.stage_forward.undone():
                    yield module
            finally:
                module.forward = self.called

    def whole(self, name: str, parameter: nn.Parameter) -> Tensor:
        here = name not in self.elsewhere
        shape, dtype = parameter.shape, parameter.dtype
        found = super().whole(name, parameter) if here else torch.empty(shape, dtype=dtype)
        found = keep_for_a_while(found.to(self.world.device).contiguous())
        source = self.line.ranks[self._places_of(name)[0]]
        with self._named("taking over the weights of other stages"):
            dist.broadcast(found, source, group=self.line.group)
        return found

    @contextmanager
    def _buffers_of_owners(self) -> Iterator[None]:
        """While it is open, each is that of the first rank of its stage."""
        buffers = dict(self.module.named_buffers())
        own = [buffer.clone() for buffer in buffers.values()]
        with self._named("taking over the buffers of other stages"):
            for name, buffer in buffers.items():
                taken = keep_for_a_while(buffer.detach().clone().contiguous())
                source = self.line.ranks[self.stages.of[name] % self.line.size]
                dist.broadcast(taken.view(-1).view(torch.uint8), source, group=self.line.group)
                write_unseen([buffer], [taken])
        try:
            yield
        finally:
            write_unseen([*buffers.values()], own)


def _prefixes(name: str) -> Iterator[str]:
    """What stands before each slash."""
    return (name[:at] for at, sign in enumerate(name) if sign == "/")

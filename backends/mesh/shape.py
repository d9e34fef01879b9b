"""The dimensions of a mesh of ranks: the driver's options, and the groups of each dimension."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from ...kernel.contract import World
from ...kernel.errors import SettingError
from ...kernel.plan import Plan
from ...kernel.ranges import check_range
from ..fsdp.sharding import ShardingOptions
from ..process_group.peers import Peers
from .matching import largest_divisor

__all__ = ["Mesh", "MeshOptions", "Shape", "options_of"]

_DIMENSIONS = ("pipeline", "replicate", "context", "tensor", "shard")


@dataclass(frozen=True)
class MeshOptions(ShardingOptions):
    """How many ranks there are along each dimension of the mesh. Ranks count through `tensor`
    first, which should stay within a machine, then `context`, `shard`, `replicate`, `pipeline`."""

    replicate: int | None = None
    """Groups of ranks that hold the same parts and see different samples; by default 1, or, where
    `shard` is given, as many as the other dimensions leave over."""
    shard: int | None = None
    """Ranks over which weights, gradients and state are cut, and that see different samples; by
    default those that the other dimensions leave over."""
    context: int = 1
    """Ranks that see the same samples, each a part of every sequence (`Parallel.sequence`). Weights
    are cut over them, too. Attention runs on whole sequences and a part of the heads each
    (https://arxiv.org/abs/2309.14509), or, where the heads do not divide, on keys and values that
    every rank gathers."""
    expert: int = 1
    """Of the ranks of shard x context x tensor so many neighbours deal the experts of a layer among
    themselves, and send each other the tokens for them (`Parallel.experts`)."""
    tensor: int = 1
    """Ranks over which single layers are cut (`Parallel.tensor`)."""
    pipeline: int = 1
    """Ranks, or meshes of them, that have one part of the model's blocks each (`Parallel.stages`),
    and hand activations on. What is in flight are the microbatches of an update: so many times as
    many should an update have (`micro_batch`)."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """In which order a pipeline's ranks compute. `gpipe` (https://arxiv.org/abs/1811.06965): all
    forwards, then all backwards. `1f1b` (https://arxiv.org/abs/1806.03377): backwards as soon as
    may be, so that no rank keeps more than `pipeline` activations. `interleaved`
    (https://arxiv.org/abs/2104.04473): likewise, with several stages on each rank, which wait
    less and talk more."""
    stages_per_rank: int | None = None
    """Of `interleaved`; 2 by default. The other schedules have one."""
    check: bool = True
    """Before the first update compute the loss of the beginning of a batch both in parts and whole,
    and that of a batch by layers that are cut, or stages, and whole, and refuse to train where they
    differ. The second gathers the whole model, and is left out, with a warning, where that has more
    than 500 million parameters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (*_DIMENSIONS, "expert"):
            check_range(f"backend.{name}", getattr(self, name), 1)
        self._check_pipeline()

    def _check_pipeline(self) -> None:
        check_range("backend.stages_per_rank", self.stages_per_rank, 1)
        interleaved = self.schedule == "interleaved"
        if self.stages_per_rank is not None and (self.stages_per_rank > 1) is not interleaved:
            raise SettingError(
                f"backend.stages_per_rank is {self.stages_per_rank} and backend.schedule "
                f"{self.schedule}: interleaved has 2 or more stages on a rank, the others have 1. "
                f"Set backend.schedule={'1f1b' if interleaved else 'interleaved'}, or leave "
                "backend.stages_per_rank out"
            )
        if self.pipeline > 1 and self.sync_batch_norm:
            raise SettingError(
                f"backend.pipeline is {self.pipeline} and backend.sync_batch_norm true: its "
                "statistics are over all ranks, and other stages compute other layers. Set "
                "backend.sync_batch_norm=false"
            )

    @property
    def least_ranks(self) -> int:
        """Of which a mesh has a multiple: all that is told of its dimensions."""
        return math.prod(getattr(self, name) or 1 for name in _DIMENSIONS)

    @property
    def in_words(self) -> str:
        """The dimensions along which more than one rank is asked for."""
        asked = {name: getattr(self, name) or 1 for name in (*_DIMENSIONS, "expert")}
        return " and ".join(f"backend.{name}={n}" for name, n in asked.items() if n > 1)

    @property
    def num_stages(self) -> int:
        """Of the pipeline; 1 without."""
        several = self.stages_per_rank or 2 if self.schedule == "interleaved" else 1
        return self.pipeline * several if self.pipeline > 1 else 1


@dataclass(frozen=True)
class Shape:
    """The ranks along each dimension."""

    replicate: int
    shard: int
    context: int
    tensor: int
    expert: int = 1
    """Of shard x context x tensor."""
    pipeline: int = 1

    @classmethod
    def of(cls, options: MeshOptions, size: int) -> Shape:
        """For so many ranks. Raises `SettingError` where they do not fit."""
        asked = {name: getattr(options, name) for name in _DIMENSIONS}
        given = {name: number for name, number in asked.items() if number is not None}
        needed = options.least_ranks
        left, missed = divmod(size, needed)
        if not missed and (left == 1 or len(given) < len(asked)):
            rest = "replicate" if "shard" in given else "shard"
            fitting = {"replicate": 1, rest: left, **given}
            return cls(expert=options.expert, **fitting)
        nearest = needed * max(1, round(size / needed))
        rule = f"needs a multiple of {needed} ranks"
        if len(given) == len(asked):
            nearest, rule = needed, f"is a mesh of {needed} ranks"
        raise SettingError(
            f"backend: {' x '.join(f'{name} {number}' for name, number in given.items())} {rule}, "
            f"and there are {size}: start {nearest} (--nproc), or change one of backend."
            + ", backend.".join(_DIMENSIONS)
        )

    @property
    def num_cut(self) -> int:
        """The ranks over which weights are cut."""
        return self.shard * self.context

    @property
    def num_cut_experts(self) -> int:
        """The ranks over which the experts of one rank are: ranks that cut layers see other tokens
        of their experts."""
        return self.num_cut * self.tensor // self.expert

    def __post_init__(self) -> None:
        number = self.num_cut * self.tensor
        if number % self.expert:
            fits = largest_divisor(number, self.expert)
            raise SettingError(
                f"backend.expert is {self.expert}, and must divide the {number} ranks that experts "
                f"are dealt to (shard {self.shard} x context {self.context} x tensor "
                f"{self.tensor}): set backend.expert={fits}, or start other ranks"
            )

    def world(self, world: World) -> World:
        """Who this rank is among readers and feeders: ranks along `tensor` and `pipeline` are one
        feeder, feeders along `context` one reader."""
        of_stage = world.size // self.pipeline
        return World(
            world.rank,
            world.size,
            world.device,
            feeder_index=world.rank % of_stage // self.tensor,
            num_feeders=of_stage // self.tensor,
            feeders_per_reader=self.context,
        )


class Mesh:
    """The process groups of a shape. Made by all ranks together."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.shape = shape

        def of_ranks(**sizes: int) -> Any:
            of_stages = {"pipeline": shape.pipeline} if shape.pipeline > 1 else {}
            sizes = {**of_stages, "replicate": shape.replicate, **sizes}
            return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

        self._root = of_ranks(shard=shape.num_cut, tensor=shape.tensor)
        self.tensor: Any = self._root["tensor"]
        """Over which layers are cut."""
        self.sharded: Any = self._root["shard"]
        """Over which weights are."""
        if shape.replicate > 1:
            self.sharded = self._root["replicate", "shard"]
        self.expert: Any = None
        """Over which experts are dealt; None: every rank has all."""
        self.experts_sharded: Any = None
        """Over which those of one rank are cut."""
        if shape.expert > 1:
            dealt = of_ranks(shard=shape.num_cut_experts, expert=shape.expert)
            self.expert, self.experts_sharded = dealt["expert"], dealt["shard"]
            if shape.replicate > 1:
                self.experts_sharded = dealt["replicate", "shard"]
        size, inner = dist.get_world_size(), shape.tensor
        of_stage = size // shape.pipeline
        self.context = None if shape.context == 1 else _group(size, shape.context, inner)
        """Of those that share sequences; None: nobody does."""
        alone = inner == shape.pipeline == 1
        self.feeders = None if alone else _group(size, of_stage // inner, inner)
        """One of each feeder; None: all ranks are feeders."""
        self.stage = Peers(dist.get_rank(), size)
        """The ranks that have the same layers."""
        if shape.pipeline > 1:
            rank = dist.get_rank()
            group = _group(size, of_stage, 1)
            self.stage = Peers(rank % of_stage, of_stage, rank - rank % of_stage, group)

    @property
    def pipeline(self) -> Any:
        """Along which stages hand on: one rank of each."""
        return self._root["pipeline"]


def _group(size: int, length: int, stride: int) -> Any:
    """This rank's, of all ranks in groups of so many that lie this far apart."""
    block = length * stride
    ranks = [
        list(range(first, first + block, stride))
        for start in range(0, size, block)
        for first in range(start, start + stride)
    ]
    own, _ = dist.new_subgroups_by_enumeration(ranks)
    return own


def options_of(plan: Plan) -> MeshOptions:
    """Those of the plan, or the defaults."""
    return plan.options or MeshOptions()

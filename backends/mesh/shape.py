"""The dimensions of a mesh of ranks: the driver's options, and the groups of each dimension."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist

from ...data.ranges import Range
from ...kernel.contract import World
from ...kernel.errors import SettingError
from ...kernel.plan import Plan
from ..fsdp.dtensor import make_mesh
from ..fsdp.sharding import ShardingOptions
from ..process_group.peers import Peers
from .matching import largest_divisor

__all__ = ["Mesh", "MeshOptions", "Shape", "options_of"]

_DIMENSIONS = ("pipeline", "replicate", "context", "tensor", "shard")


Ranks = Annotated[int, Range(1, unit="ranks")]


@dataclass(frozen=True)
class MeshOptions(ShardingOptions):
    """Number of ranks along each dimension of the mesh. Ranks count through `tensor` first, which
    should stay within a machine, then `context`, `shard`, `replicate`, `pipeline`.
    """

    replicate: Ranks | None = None
    """Groups of ranks that hold the same parts and see different samples; by default 1, or, where
    `shard` is given, as many as the other dimensions leave over."""
    shard: Ranks | None = None
    """Ranks over which weights, gradients and state are sharded, and that see different samples; by
    default those that the other dimensions leave over.
    """
    context: Ranks = 1
    """Ranks that see the same samples, each a part of every sequence (`Parallel.sequence`). Weights
    are sharded over them, too. For attention each rank has whole sequences and a part of the heads
    (https://arxiv.org/abs/2309.14509). If the heads do not divide, every rank gathers keys and
    values instead.
    """
    expert: Ranks = 1
    """Number of neighbours among the ranks of shard x context x tensor that share the experts of a
    layer. They send each other the tokens for their experts (`Parallel.experts`).
    """
    tensor: Ranks = 1
    """Ranks over which single layers are partitioned (`Parallel.tensor`)."""
    pipeline: Ranks = 1
    """Ranks of a pipeline, or meshes of ranks. Each holds a part of the model's blocks
    (`Parallel.stages`) and sends activations on. The microbatches of an update are in flight at
    once: an update should have several times as many as there are ranks here (`micro_batch`).
    """
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """Order in which a pipeline's ranks compute. `gpipe` (https://arxiv.org/abs/1811.06965): all
    forwards, then all backwards. `1f1b` (https://arxiv.org/abs/1806.03377): each backward as early
    as possible, so that no rank keeps more than `pipeline` activations. `interleaved`
    (https://arxiv.org/abs/2104.04473): like `1f1b` with several stages on each rank, which wait
    less and communicate more.
    """
    stages_per_rank: Annotated[int, Range(1, unit="stages")] | None = None
    """Stages of each rank with the schedule `interleaved`; 2 by default. The other schedules have
    one.
    """
    check: bool = True
    """Compare the partitioned model with the whole one before the first update, and refuse to train
    if they differ. Sequences are compared on the beginning of a batch; layers, experts and stages
    on a batch. The latter gathers the whole model, and is left out, with a warning, for a model of
    more than 500 million parameters.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_pipeline()

    def _check_pipeline(self) -> None:
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
    def min_ranks(self) -> int:
        """Return the product of the dimensions given; the world size must be a multiple of it."""
        return math.prod(getattr(self, name) or 1 for name in _DIMENSIONS)

    @property
    def description(self) -> str:
        """Describe the dimensions along which more than one rank is asked for."""
        asked = {name: getattr(self, name) or 1 for name in (*_DIMENSIONS, "expert")}
        return " and ".join(f"backend.{name}={n}" for name, n in asked.items() if n > 1)

    @property
    def num_stages(self) -> int:
        """Return the number of stages of the pipeline; 1 without a pipeline."""
        several = self.stages_per_rank or 2 if self.schedule == "interleaved" else 1
        return self.pipeline * several if self.pipeline > 1 else 1


@dataclass(frozen=True)
class Shape:
    """Number of ranks along each dimension."""

    replicate: int
    shard: int
    context: int
    tensor: int
    expert: int = 1
    """Ranks of shard x context x tensor that share the experts of a layer."""
    pipeline: int = 1

    @classmethod
    def of(cls, options: MeshOptions, size: int) -> Shape:
        """Return the shape of a mesh of `size` ranks. Raises `SettingError` if the options do not
        fit.
        """
        asked = {name: getattr(options, name) for name in _DIMENSIONS}
        given = {name: number for name, number in asked.items() if number is not None}
        needed = options.min_ranks
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
    def num_shards(self) -> int:
        """Number of ranks over which weights are sharded."""
        return self.shard * self.context

    @property
    def num_expert_shards(self) -> int:
        """Number of ranks that shard the same experts. Ranks along `tensor` count: they send
        different tokens to experts.
        """
        return self.num_shards * self.tensor // self.expert

    def __post_init__(self) -> None:
        number = self.num_shards * self.tensor
        if number % self.expert:
            largest = largest_divisor(number, self.expert)
            raise SettingError(
                f"backend.expert is {self.expert}, and must divide the {number} ranks that experts "
                f"are partitioned over (shard {self.shard} x context {self.context} x tensor "
                f"{self.tensor}): set backend.expert={largest}, or start other ranks"
            )

    def world(self, world: World) -> World:
        """Return this rank's place among readers and feeders. Ranks along `tensor` and `pipeline`
        are one feeder; feeders along `context` are one reader.
        """
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
    """Process groups of a shape. All ranks construct it together."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape

        def device_mesh(**sizes: int) -> Any:
            of_stages = {"pipeline": shape.pipeline} if shape.pipeline > 1 else {}
            sizes = {**of_stages, "replicate": shape.replicate, **sizes}
            return make_mesh(device.type, tuple(sizes.values()), tuple(sizes))

        root = device_mesh(shard=shape.num_shards, tensor=shape.tensor)
        self.tensor: Any = root["tensor"]
        """Ranks over which layers are partitioned."""
        self.sharded: Any = root["shard"]
        """Ranks over which weights are sharded."""
        if shape.replicate > 1:
            self.sharded = root["replicate", "shard"]
        self.expert: Any = None
        """Ranks that share the experts of a layer; None: every rank has all experts."""
        self.experts_sharded: Any = None
        """Ranks that shard the same experts."""
        if shape.expert > 1:
            expert_mesh = device_mesh(shard=shape.num_expert_shards, expert=shape.expert)
            self.expert, self.experts_sharded = expert_mesh["expert"], expert_mesh["shard"]
            if shape.replicate > 1:
                self.experts_sharded = expert_mesh["replicate", "shard"]
        size, inner = dist.get_world_size(), shape.tensor
        of_stage = size // shape.pipeline
        self.context = None if shape.context == 1 else _group(size, shape.context, inner)
        """Process group of the ranks that share sequences; None: each rank has whole ones."""
        all_feed = inner == shape.pipeline == 1
        self.feeders = None if all_feed else _group(size, of_stage // inner, inner)
        """Process group of one rank of each feeder; None: all ranks are feeders."""
        self.stage = Peers(dist.get_rank(), size)
        """The ranks that have the same layers."""
        if shape.pipeline > 1:
            self.pipeline = root["pipeline"]
            """Ranks of a pipeline: one of each stage."""
            rank = dist.get_rank()
            group = _group(size, of_stage, 1)
            self.stage = Peers(rank % of_stage, of_stage, rank - rank % of_stage, group)


def _group(size: int, length: int, stride: int) -> Any:
    """Return this rank's process group, if all `size` ranks form groups of `length`, `stride`
    apart.
    """
    block = length * stride
    ranks = [
        list(range(first, first + block, stride))
        for start in range(0, size, block)
        for first in range(start, start + stride)
    ]
    own, _ = dist.new_subgroups_by_enumeration(ranks)
    return own


def options_of(plan: Plan) -> MeshOptions:
    """Return the mesh options of the plan, or the defaults."""
    return plan.options or MeshOptions()

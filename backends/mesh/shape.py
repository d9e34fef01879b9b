"""The dimensions of a mesh of ranks: the driver's options, and the groups of each dimension."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...kernel.contract import World
from ...kernel.errors import SettingError
from ...kernel.ranges import check_range
from ..fsdp.sharding import ShardingOptions

__all__ = ["Mesh", "MeshOptions", "Shape"]

_FIXED = ("replicate", "context", "tensor")


@dataclass(frozen=True)
class MeshOptions(ShardingOptions):
    """How many ranks there are along each dimension of the mesh. Ranks count through `tensor`
    first, which should stay within a machine, then `context`, `shard` and `replicate`."""

    replicate: int = 1
    """Groups of ranks that hold the same parts and see different samples."""
    shard: int | None = None
    """Ranks over which weights, gradients and state are cut, and that see different samples; by
    default those that the other dimensions leave over."""
    context: int = 1
    """Ranks that see the same samples, each a part of every sequence (`Parallel.sequence`). Weights
    are cut over them, too. Attention runs on whole sequences and a part of the heads each
    (https://arxiv.org/abs/2309.14509), or, where the heads do not divide, on keys and values that
    every rank gathers."""
    expert: int = 1
    """Of the ranks over which weights are cut (shard x context) so many deal the experts of a layer
    among themselves, and send each other the tokens for them (`Parallel.experts`)."""
    tensor: int = 1
    """Ranks over which single layers are cut (`Parallel.tensor`). Not with `expert`."""
    check: bool = True
    """Before the first update compute the loss of the beginning of a batch both in parts and whole,
    and that of a batch by layers that are cut and whole, and refuse to train where they differ. The
    second gathers the whole model, and is left out of one with more than 500 million parameters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (*_FIXED, "shard", "expert"):
            check_range(f"backend.{name}", getattr(self, name), 1)
        if self.expert > 1 and self.tensor > 1:
            raise SettingError(
                f"backend.expert is {self.expert} and backend.tensor {self.tensor}: experts are "
                "not dealt where layers are cut, whose ranks share their tokens. Set one of them "
                "to 1"
            )


@dataclass(frozen=True)
class Shape:
    """The ranks along each dimension."""

    replicate: int
    shard: int
    context: int
    tensor: int
    expert: int = 1
    """Of shard x context."""

    @classmethod
    def of(cls, options: MeshOptions, size: int) -> Shape:
        """For so many ranks. Raises `SettingError` where they do not fit."""
        fixed = {name: getattr(options, name) for name in _FIXED}
        needed = math.prod(fixed.values()) * (options.shard or 1)
        if size % needed == 0 and options.shard in (None, size // math.prod(fixed.values())):
            shard = size // math.prod(fixed.values())
            return cls(shard=shard, expert=options.expert, **fixed)
        asked = " x ".join(f"{name} {number}" for name, number in fixed.items())
        if options.shard is not None:
            asked += f" x shard {options.shard}"
            rule = f"is a mesh of {needed} ranks"
        else:
            rule = f"needs a multiple of {needed} ranks"
        nearest = needed if options.shard else needed * max(1, round(size / needed))
        raise SettingError(
            f"backend: {asked} {rule}, and there are {size}: start {nearest} (--nproc), or change "
            "one of backend." + ", backend.".join((*_FIXED, "shard"))
        )

    @property
    def num_cut(self) -> int:
        """The ranks over which weights are cut."""
        return self.shard * self.context

    def __post_init__(self) -> None:
        if self.num_cut % self.expert:
            fits = [n for n in range(1, self.num_cut + 1) if self.num_cut % n == 0]
            nearest = min(fits, key=lambda n: abs(n - self.expert))
            raise SettingError(
                f"backend.expert is {self.expert}, and must divide the {self.num_cut} ranks that "
                f"weights are cut over (shard {self.shard} x context {self.context}): set "
                f"backend.expert={nearest}, or start other ranks"
            )

    def world(self, world: World) -> World:
        """Who this rank is among readers and feeders: ranks along `tensor` are one feeder, feeders
        along `context` one reader."""
        return World(
            world.rank,
            world.size,
            world.device,
            feeder_index=world.rank // self.tensor,
            num_feeders=world.size // self.tensor,
            feeders_per_reader=self.context,
        )


class Mesh:
    """The process groups of a shape. Made by all ranks together."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.shape = shape
        sizes = shape.replicate, shape.num_cut, shape.tensor
        names = "replicate", "shard", "tensor"
        self._root = init_device_mesh(device.type, sizes, mesh_dim_names=names)
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
            sizes = shape.replicate, shape.num_cut // shape.expert, shape.expert
            names = "replicate", "shard", "expert"
            dealt = init_device_mesh(device.type, sizes, mesh_dim_names=names)
            self.expert, self.experts_sharded = dealt["expert"], dealt["shard"]
            if shape.replicate > 1:
                self.experts_sharded = dealt["replicate", "shard"]
        size, inner = dist.get_world_size(), shape.tensor
        self.context = None if shape.context == 1 else _group(size, shape.context, inner)
        """Of those that share sequences; None: nobody does."""
        self.feeders = None if inner == 1 else _group(size, size // inner, inner)
        """One of each feeder; None: all ranks are feeders."""


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

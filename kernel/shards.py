"""The parts of a checkpoint: pieces of tensors, and a reader of any region of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

__all__ = ["Box", "Flat", "Kind", "Piece", "Reader", "Region", "TensorInfo"]

Kind = Literal["weights", "optimizer", "state"]


@dataclass(frozen=True)
class Box:
    """An axis-aligned part of a tensor: `offsets[d] <= index[d] < offsets[d] + sizes[d]`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Flat:
    """The elements `start <= i < stop` of a tensor that is laid out row after row."""

    start: int
    stop: int


Region = Box | Flat


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that one rank writes.

    `name`: an FQN (weights), `<fqn>/<state>` (optimizer) or a free name (state; a loss scaler has
    `loss_scale` and `loss_scale_good_steps`). `checkpoint.optimizer_entries` says how numbers,
    lists and what an optimizer counts in its groups are named, `checkpoint.extra_state` how the
    state of modules is. `tensor`: the part, on any device; a box keeps its sizes, a flat range is
    one-dimensional. `shape`: of the whole tensor. `region`: which part; None is all of it."""

    kind: Kind
    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    region: Region | None = None


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint, as known without reading it."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Reader(Protocol):
    """Reads any region of any tensor of a checkpoint, of whichever driver and world size."""

    def names(self, kind: Kind) -> Sequence[str]:
        """All names of that kind, sorted."""

    def info(self, kind: Kind, name: str) -> TensorInfo:
        """The dtype and global shape. Raises `CheckpointMismatch` when there is no such tensor."""

    def read(
        self, kind: Kind, name: str, region: Region | None = None, out: Tensor | None = None
    ) -> Tensor:
        """A CPU tensor with the stored dtype: the whole (global shape), a box (its sizes) or a
        flat range (one-dimensional). A new one, or `out`: a contiguous one of that dtype and shape,
        which is then written to. Raises `CheckpointMismatch` for an unknown name, a region outside
        the tensor, or another `out`; `CheckpointDamaged` when stored pieces leave a gap."""

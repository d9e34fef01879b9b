"""Ranks in a row that hand tensors on, forwards and backwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...data.nested import leaves, map_leaves, map_tensors, tensors_of
from ..fsdp import dtensor
from ..process_group.collectives import keep_for_a_while

__all__ = ["Line"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMS = 8


@dataclass(frozen=True)
class _Shape:
    """Of a tensor that follows. Of one that is cut within a stage it is the part that follows, to
    the rank that has the same part in its own stage."""

    shape: torch.Size
    dtype: torch.dtype
    cut: Any = None
    """Placements, shape and stride of the whole; None: it is no part."""

    @classmethod
    def of(cls, tensor: Tensor) -> _Shape:
        part = dtensor.own_part(tensor)
        if not isinstance(tensor, DTensor):
            return cls(part.shape, part.dtype)
        return cls(part.shape, part.dtype, (tensor.placements, tensor.shape, tensor.stride()))

    def put_back(self, part: Tensor, mesh: Any) -> Tensor:
        """What the part is of, cut over these ranks."""
        if self.cut is None:
            return part
        placements, shape, stride = self.cut
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=shape, stride=stride
        )


class Line:
    """This rank's place among those of a process group, the last of which knows the answer. `mesh`:
    the ranks over which each cuts its layers."""

    def __init__(self, group: Any, device: torch.device, mesh: Any) -> None:
        self.group, self.device, self.mesh = group, device, mesh
        self.ranks = dist.get_process_group_ranks(group)
        self.size, self.place = len(self.ranks), dist.get_rank(group)
        self.before = self.ranks[self.place - 1]
        self.after = self.ranks[(self.place + 1) % self.size]

    def send(self, tensor: Tensor, rank: int) -> None:
        """Its dtype and sizes go first, so that it may be of any."""
        tensor = keep_for_a_while(tensor.detach().contiguous())
        sizes = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        head = torch.tensor(sizes + [0] * (_MOST_DIMS + 2 - len(sizes)), device=self.device)
        dist.send(keep_for_a_while(head), rank, group=self.group)
        dist.send(tensor, rank, group=self.group)

    def take(self, rank: int) -> Tensor:
        """What that rank sends."""
        head = torch.empty(_MOST_DIMS + 2, dtype=torch.int64, device=self.device)
        dist.recv(head, rank, group=self.group)
        kind, dims, *sizes = head.tolist()
        tensor = torch.empty(sizes[:dims], dtype=_DTYPES[kind], device=self.device)
        dist.recv(keep_for_a_while(tensor), rank, group=self.group)
        return tensor

    def tell(self, answer: Any) -> None:
        """By the last rank: tensors in any nest."""
        shapes = map_tensors(_Shape.of, answer)
        dist.broadcast_object_list([shapes], self.ranks[-1], self.group, self.device)
        for tensor in tensors_of(answer):
            sent = keep_for_a_while(dtensor.own_part(tensor).contiguous())
            dist.broadcast(sent, self.ranks[-1], group=self.group)

    def hear(self) -> tuple[Any, list[Tensor]]:
        """By all others: what the last rank tells, with shapes in place of tensors; and these."""
        told: list[Any] = [None]
        dist.broadcast_object_list(told, self.ranks[-1], self.group, self.device)
        tensors = []
        for shape in (leaf for leaf in leaves(told[0]) if isinstance(leaf, _Shape)):
            tensor = torch.empty(shape.shape, dtype=shape.dtype, device=self.device)
            dist.broadcast(keep_for_a_while(tensor), self.ranks[-1], group=self.group)
            tensors.append(tensor)
        return told[0], tensors

    # --- the same, with gradients that go the other way -------------------------------------

    def receive(self) -> Tensor:
        """Of the rank before."""
        anchor = torch.zeros((), device=self.device, requires_grad=True)
        return cast(Tensor, _Receive.apply(anchor, self))

    def exchange(self, activation: Tensor) -> Tensor:
        """To the rank after, and what comes of it from the rank before."""
        return cast(Tensor, _Exchange.apply(activation, self))

    def answer(self, activation: Tensor) -> Any:
        """To the rank after; and what the last rank tells at last."""
        nest: list[Any] = []
        tensors = iter(cast("tuple[Tensor, ...]", _Answer.apply(activation, self, nest)))

        def fill(leaf: Any) -> Any:
            is_one = isinstance(leaf, _Shape)
            return leaf.put_back(next(tensors), self.mesh) if is_one else leaf

        return map_leaves(fill, nest[0])


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return line.take(line.before)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.line.send(gradients[0], ctx.line.before)
        return torch.zeros((), device=ctx.line.device), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Tensor, line: Line) -> Tensor:
        ctx.line = line
        line.send(activation, line.after)
        return line.take(line.before)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.line.send(gradients[0], ctx.line.before)
        return ctx.line.take(ctx.line.after), None


class _Answer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Tensor, line: Line, nest: list[Any]) -> tuple[Tensor, ...]:
        ctx.line = line
        line.send(activation, line.after)
        told, tensors = line.hear()
        nest.append(told)
        whole = [tensor for tensor in tensors if not tensor.is_floating_point()]
        ctx.mark_non_differentiable(*whole)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # that of the answer comes by way of the last rank, which computes it too
        return ctx.line.take(ctx.line.after), None, None

"""Ranks in a row that hand tensors on, forwards and backwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ...data.nested import map_leaves, map_tensors, tensors_of
from ..process_group.collectives import keep_for_a_while

__all__ = ["Line"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMS = 8


@dataclass(frozen=True)
class _Shape:
    """Of a tensor that follows."""

    shape: torch.Size
    dtype: torch.dtype


class Line:
    """This rank's place among those of a process group, the last of which knows the answer."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
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
        shapes = map_tensors(lambda each: _Shape(each.shape, each.dtype), answer)
        dist.broadcast_object_list([shapes], self.ranks[-1], self.group, self.device)
        for tensor in tensors_of(answer):
            sent = keep_for_a_while(tensor.detach().contiguous())
            dist.broadcast(sent, self.ranks[-1], group=self.group)

    def hear(self) -> tuple[Any, list[Tensor]]:
        """By all others: what the last rank tells, tensors apart."""
        told: list[Any] = [None]
        dist.broadcast_object_list(told, self.ranks[-1], self.group, self.device)
        tensors = []

        def fill(leaf: _Shape) -> Tensor:
            tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device)
            dist.broadcast(keep_for_a_while(tensor), self.ranks[-1], group=self.group)
            tensors.append(tensor)
            return tensor

        nest = map_leaves(lambda leaf: fill(leaf) if isinstance(leaf, _Shape) else leaf, told[0])
        return nest, tensors

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
        return map_tensors(lambda _: next(tensors), nest[0])


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

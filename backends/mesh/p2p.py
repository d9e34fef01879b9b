"""Pipeline p2p: ranks send activations to the next rank, and gradients to the previous one."""

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

__all__ = ["RECEIVES_ACTIVATION", "RECEIVES_OUTPUT", "PipelineP2P"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_DIMS = 8


@dataclass(frozen=True)
class _TensorInfo:
    """Shape and dtype of the next tensor. Of a DTensor only the local shard is sent, to the rank
    that has the same shard in its own stage.
    """

    shape: torch.Size
    dtype: torch.dtype
    sharding: Any = None
    """Placements, shape and stride of the whole DTensor; None for a plain tensor."""

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorInfo:
        local = dtensor.own_part(tensor)
        if not isinstance(tensor, DTensor):
            return cls(local.shape, local.dtype)
        return cls(local.shape, local.dtype, (tensor.placements, tensor.shape, tensor.stride()))

    def restore(self, local: Tensor, mesh: Any) -> Tensor:
        """Return the DTensor over `mesh` whose local shard this is; a plain tensor as it is."""
        if self.sharding is None:
            return local
        placements, shape, stride = self.sharding
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=stride
        )


class PipelineP2P:
    """Communication of this rank with the others of its pipeline. `mesh`: the ranks over which each
    of them partitions its layers.
    """

    def __init__(self, group: Any, device: torch.device, mesh: Any) -> None:
        self.group, self.device, self.mesh = group, device, mesh
        self.ranks = dist.get_process_group_ranks(group)
        self.size, self.index = len(self.ranks), dist.get_rank(group)
        self.previous = self.ranks[self.index - 1]
        self.next = self.ranks[(self.index + 1) % self.size]

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor of any dtype and shape: these go first."""
        tensor = keep_for_a_while(tensor.detach().contiguous())
        sizes = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        header = torch.tensor(sizes + [0] * (_MAX_DIMS + 2 - len(sizes)), device=self.device)
        dist.send(keep_for_a_while(header), rank, group=self.group)
        dist.send(tensor, rank, group=self.group)

    def receive(self, rank: int) -> Tensor:
        """Receive a tensor from `rank`."""
        header = torch.empty(_MAX_DIMS + 2, dtype=torch.int64, device=self.device)
        dist.recv(header, rank, group=self.group)
        dtype, num_dims, *sizes = header.tolist()
        tensor = torch.empty(sizes[:num_dims], dtype=_DTYPES[dtype], device=self.device)
        dist.recv(keep_for_a_while(tensor), rank, group=self.group)
        return tensor

    def broadcast(self, output: Any) -> None:
        """Broadcast tensors in any nest from the last rank, which alone calls this."""
        shapes = map_tensors(_TensorInfo.of, output)
        dist.broadcast_object_list([shapes], self.ranks[-1], self.group, self.device)
        for tensor in tensors_of(output):
            sent = keep_for_a_while(dtensor.own_part(tensor).contiguous())
            dist.broadcast(sent, self.ranks[-1], group=self.group)

    def receive_broadcast(self) -> tuple[Any, list[Tensor]]:
        """Receive the last rank's broadcast, on all other ranks: the nest, with shapes in place of
        tensors, and the tensors.
        """
        shapes: list[Any] = [None]
        dist.broadcast_object_list(shapes, self.ranks[-1], self.group, self.device)
        tensors = []
        for shape in (leaf for leaf in leaves(shapes[0]) if isinstance(leaf, _TensorInfo)):
            tensor = torch.empty(shape.shape, dtype=shape.dtype, device=self.device)
            dist.broadcast(keep_for_a_while(tensor), self.ranks[-1], group=self.group)
            tensors.append(tensor)
        return shapes[0], tensors

    # --- with gradients, which go the other way ---------------------------------------------

    def receive_activation(self, sent: Tensor | None) -> Tensor:
        """Receive an activation from the previous rank. `sent`: first send this activation to the
        next rank.
        """
        anchor = torch.zeros((), device=self.device, requires_grad=True) if sent is None else sent
        return cast(Tensor, _ReceiveActivation.apply(anchor, self, sent is not None))

    def receive_output(self, sent: Tensor) -> Any:
        """Send an activation to the next rank, and receive the last rank's broadcast."""
        nest: list[Any] = []
        tensors = iter(cast("tuple[Tensor, ...]", _ReceiveOutput.apply(sent, self, nest)))

        def fill(leaf: Any) -> Any:
            is_tensor = isinstance(leaf, _TensorInfo)
            return leaf.restore(next(tensors), self.mesh) if is_tensor else leaf

        return map_leaves(fill, nest[0])


class _ReceiveActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, p2p: PipelineP2P, sends: bool) -> Tensor:
        ctx.p2p, ctx.sends = p2p, sends
        if sends:
            p2p.send(tensor, p2p.next)
        return p2p.receive(p2p.previous)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        p2p = ctx.p2p
        p2p.send(gradients[0], p2p.previous)
        gradient = p2p.receive(p2p.next) if ctx.sends else torch.zeros((), device=p2p.device)
        return gradient, None, None


class _ReceiveOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, activation: Tensor, p2p: PipelineP2P, nest: list[Any]
    ) -> tuple[Tensor, ...]:
        ctx.p2p = p2p
        p2p.send(activation, p2p.next)
        shapes, tensors = p2p.receive_broadcast()
        nest.append(shapes)
        ctx.mark_non_differentiable(*(each for each in tensors if not each.is_floating_point()))
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # the gradient of the return value arrives through the last rank, which computes it, too
        return ctx.p2p.receive(ctx.p2p.next), None, None


RECEIVES_ACTIVATION = _ReceiveActivation
"""Function of autograd through which a stage receives activations."""
RECEIVES_OUTPUT = _ReceiveOutput
"""Function of autograd through which the last rank's broadcast enters the loss."""

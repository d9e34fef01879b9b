"""Step sharded matrices, each whole on one rank, with the work balanced over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...kernel.shards import Box
from ..common.attached import in_place_of
from ..process_group.collectives import keep_for_a_while
from . import dtensor

__all__ = ["OwnerStep", "kept_of"]

_KEPT = {getattr(torch.optim, "Muon", None): ("momentum_buffer",)}
"""Optimizers that take each tensor by itself, and what they keep of one: tensors of its shape."""


def kept_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...] | None:
    """Return the names of the state that the optimizer keeps of a parameter; None if an owner
    cannot step it.
    """
    return _KEPT.get(type(optimizer))


@dataclass(frozen=True)
class _Sharded:
    """A sharded parameter, with its group in the optimizer."""

    group: dict[str, Any]
    parameter: Any

    @property
    def work(self) -> int:
        """Estimate the work of orthogonalising the tensor, up to a constant factor."""
        sizes = sorted(self.parameter.shape)
        return int(self.parameter.numel()) * int(sizes[0])


class OwnerStep:
    """Optimizer step in which one rank, the owner of a tensor, updates the whole tensor. The owner
    receives weight, gradient and state, and sends each rank its shard of the result. A rank owns
    one tensor at a time, so it holds at most one whole tensor. A tensor that is whole on a rank
    anyway is stepped on this rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer, self.device = optimizer, device
        self._keys = kept_of(optimizer) or ()
        self._wide = torch.float32
        """Dtype of all transfers; wide enough that nothing is rounded."""

    def step(self) -> None:
        """Update all parameters, each whole tensor on its owner."""
        groups = self.optimizer.param_groups
        all_of_it = [(group, group["params"]) for group in groups]
        sharded = [
            _Sharded(group, parameter)
            for group, parameters in all_of_it
            for parameter in parameters
            if dtensor.is_sharded(parameter) and parameter.grad is not None
        ]
        try:
            for group, parameters in all_of_it:
                group["params"] = [p for p in parameters if not dtensor.is_sharded(p)]
            self.optimizer.step()
            if sharded:
                dtypes = {each.parameter.dtype for each in sharded}
                self._wide = reduce(torch.promote_types, dtypes, torch.float32)
                axis = _sharded_axis(sharded[0].parameter)
                num_owners = sharded[0].parameter.device_mesh.size(axis)
                for turn in zip_longest(*partition_work(sharded, num_owners)):
                    self._step(turn, axis)
        finally:
            self.optimizer.param_groups = groups
            for group, parameters in all_of_it:
                group["params"] = parameters

    def _step(self, turn: Sequence[_Sharded | None], axis: int) -> None:
        """One tensor of each owner."""
        mesh = next(each for each in turn if each is not None).parameter.device_mesh
        group, rank = mesh.get_group(axis), mesh.get_local_rank(axis)
        mine = turn[rank]
        boxes = None if mine is None else _boxes(mine.parameter, axis)
        sent = [None if each is None else self._parts(each.parameter) for each in turn]
        count = 0 if mine is None else len(sent[rank] or ())
        found = self._exchange(sent, [_sizes(boxes, r) * count for r in range(len(turn))], group)
        back: list[list[Tensor] | None] = [None] * len(turn)
        if mine is not None and boxes is not None:
            whole = [_assembled(mine.parameter.shape, boxes, found, n) for n in range(count)]
            stepped = self._stepped(mine, whole)
            back = [[_of(tensor, box) for tensor in stepped] for box in boxes]
        own = [0 if e is None else dtensor.own_part(e.parameter).numel() for e in turn]
        taken = self._exchange(back, [size * (1 + len(self._keys)) for size in own], group)
        for each, parts in zip(turn, taken, strict=True):
            if each is not None:
                self._take(each.parameter, parts)

    def _parts(self, parameter: nn.Parameter) -> list[Tensor]:
        """This rank's part of the weight, of the gradient, and of what is kept, if there is any."""
        state = self.optimizer.state.get(parameter, {})
        kept = [state[key] for key in self._keys if key in state]
        assert parameter.grad is not None
        return [dtensor.own_part(tensor) for tensor in (parameter, parameter.grad, *kept)]

    def _exchange(
        self, sent: Sequence[Sequence[Tensor] | None], sizes: Sequence[int], group: Any
    ) -> list[Tensor]:
        """Send each rank a list of tensors in one; returns what each has sent, of these sizes."""
        flat = [
            torch.cat([tensor.reshape(-1).to(self._wide) for tensor in tensors])
            if tensors
            else None
            for tensors in sent
        ]
        empty = torch.empty(0, dtype=self._wide, device=self.device)
        joined = torch.cat([empty if t is None else t.to(self.device) for t in flat])
        received = empty.new_empty(sum(sizes))
        dist.all_to_all_single(
            keep_for_a_while(received),
            keep_for_a_while(joined),
            list(sizes),
            [0 if tensor is None else tensor.numel() for tensor in flat],
            group=group,
        )
        return list(received.split_with_sizes(list(sizes)))

    def _stepped(self, mine: _Sharded, whole: Sequence[Tensor]) -> list[Tensor]:
        """The weight and what is kept of it, updated."""
        weight, grad, *kept = whole
        local = dtensor.own_part(mine.parameter)
        stand_in = in_place_of(mine.parameter, weight.to(local.device, local.dtype))
        stand_in.grad = grad.to(stand_in)
        states = self.optimizer.state
        if kept:
            pairs = zip(self._keys, kept, strict=True)
            states[stand_in] = {key: tensor.to(stand_in) for key, tensor in pairs}
        self.optimizer.param_groups = [mine.group]
        mine.group["params"] = [stand_in]
        self.optimizer.step()
        state = states.pop(stand_in)
        return [stand_in.detach(), *(state[key] for key in self._keys)]

    @torch.no_grad()
    def _take(self, parameter: Any, parts: Tensor) -> None:
        local = dtensor.own_part(parameter)
        weight, *kept = parts.view(1 + len(self._keys), *local.shape).unbind()
        local.copy_(weight)
        state = self.optimizer.state[parameter]
        for key, part in zip(self._keys, kept, strict=True):
            state[key] = dtensor.sharded_like(parameter, part.to(local.dtype, copy=True))


def partition_work(sharded: Iterable[_Sharded], num_owners: int) -> list[list[_Sharded]]:
    """Return the tensors of each owner: the largest first, each to whoever has the least work."""
    owners: list[list[_Sharded]] = [[] for _ in range(num_owners)]
    work = [0] * num_owners
    for each in sorted(sharded, key=lambda each: -each.work):
        owner = work.index(min(work))
        owners[owner].append(each)
        work[owner] += each.work
    return owners


def _sharded_axis(parameter: DTensor) -> int:
    """The axis of the mesh along which it is sharded; along the others it is replicated."""
    return next(axis for axis, each in enumerate(parameter.placements) if each.is_shard())


def _boxes(parameter: DTensor, axis: int) -> list[Box]:
    """The part of each rank along that axis."""
    dim, size = parameter.placements[axis].dim, parameter.device_mesh.size(axis)  # type: ignore[attr-defined]
    return [dtensor.chunk_of(tuple(parameter.shape), [(dim, n, size)]) for n in range(size)]


def _sizes(boxes: Sequence[Box] | None, rank: int) -> int:
    return 0 if boxes is None else torch.Size(boxes[rank].sizes).numel()


def _assembled(
    shape: torch.Size, boxes: Sequence[Box], found: Sequence[Tensor], number: int
) -> Tensor:
    """The tensor of that number in what each rank has sent, whole."""
    whole = found[0].new_empty(shape)
    for box, parts in zip(boxes, found, strict=True):
        size = torch.Size(box.sizes).numel()
        part = parts[number * size : (number + 1) * size]
        _of(whole, box).copy_(part.view(box.sizes))
    return whole


def _of(tensor: Tensor, box: Box) -> Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor

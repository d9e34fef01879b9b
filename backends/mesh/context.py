"""Sequences that are partitioned over ranks, and attention over all of them.

The method is that of DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509). Outside of attention
each rank computes its part of the positions with all heads. For attention ranks exchange, so that
each has all positions of its part of the heads. The model needs no change, as long as it calls
`scaled_dot_product_attention`. Shapes: B sequences, H heads of size D, T positions, t of them on
this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ...data.parallel import Parallel
from ...kernel.errors import CapabilityRefused, DataError, RecipeError
from ...kernel.recipe import Batch
from ..fsdp.partition import Partition
from ..process_group.collectives import keep_for_a_while

__all__ = ["ContextPartition", "UlyssesAttention"]

_ATTENTION = F.scaled_dot_product_attention
_CHECKED_POSITIONS = 64
"""Number of positions of each rank that are compared with whole sequences."""


class _Exchange(torch.autograd.Function):
    """All-to-all: send chunk i along `split_dim` to rank i, and concatenate the received ones along
    `concat_dim`. Backward goes the other way.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split_dim: int, concat_dim: int, group: Any) -> Tensor:
        ctx.dims = concat_dim, split_dim, group
        size = dist.get_world_size(group)
        sent = torch.stack([part.contiguous() for part in tensor.chunk(size, split_dim)])
        received = torch.empty_like(sent)
        dist.all_to_all_single(keep_for_a_while(received), keep_for_a_while(sent), group=group)
        return torch.cat(received.unbind(0), concat_dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        exchange = cast(Any, _Exchange.apply)
        return exchange(gradients[0], *ctx.dims), None, None, None


class _Gather(torch.autograd.Function):
    """All-gather along dimension -2; backward adds up the gradient over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group, own = group, tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, keep_for_a_while(own), group=group)
        return torch.cat(parts, -2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(keep_for_a_while(total), group=ctx.group)
        size, own = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return total.chunk(size, -2)[own], None


class UlyssesAttention(TorchFunctionMode):
    """Ulysses attention: within the block, `scaled_dot_product_attention` sees all positions."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.size = group, dist.get_world_size(group)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not _ATTENTION:
            return function(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Tensor:
        """Compute attention over all positions. Shapes (B, H, t, D); key and value may have fewer
        heads.
        """
        if attn_mask is not None:
            _refuse("an attention mask, which is of this rank's positions", "without a mask")
        if query.shape[-2] != key.shape[-2]:
            _refuse(
                f"attention of {query.shape[-2]} positions to {key.shape[-2]} others",
                "attending to their own sequence",
            )
        # no call from here may enter a TorchFunctionMode again, this one or another like it
        with torch._C.DisableTorchFunction():
            heads = [tensor.shape[-3] if tensor.dim() > 3 else 1 for tensor in (query, key)]
            if any(number % self.size for number in heads):
                return self._attend_gathered(
                    query, key, value, is_causal, dropout_p=dropout_p, **more
                )
            exchange = cast(Any, _Exchange.apply)
            q, k, v = (exchange(each, -3, -2, self.group) for each in (query, key, value))
            output = _ATTENTION(q, k, v, dropout_p=dropout_p, is_causal=is_causal, **more)
            return cast(Tensor, exchange(output, -2, -3, self.group))

    def _attend_gathered(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, **more: Any
    ) -> Tensor:
        """Compute attention of this rank's positions to gathered keys and values."""
        mask = None
        if is_causal:
            length, own = query.shape[-2], dist.get_rank(self.group)
            positions = torch.arange(length * self.size, device=query.device)
            mask = positions[own * length : (own + 1) * length, None] >= positions
        gather = cast(Any, _Gather.apply)
        keys, values = gather(key, self.group), gather(value, self.group)
        return _ATTENTION(query, keys, values, attn_mask=mask, **more)


def _refuse(what: str, remedy: str) -> None:
    raise CapabilityRefused(
        f"backend.context with {what}",
        "mesh",
        f"sequences are split over ranks. Train a model that calls attention {remedy} "
        "(`is_causal=True`), or set backend.context=1",
    )


class ContextPartition(Partition):
    """Partitions the sequences of batches over the ranks of `group`."""

    def __init__(self, parallel: Parallel, group: Any) -> None:
        self.group = group
        self.size, self.index = dist.get_world_size(group), dist.get_rank(group)
        self.attention = UlyssesAttention(group)
        self.parallel = parallel
        if not self.parallel.sequence:
            raise RecipeError(
                f"backend.context is {self.size}, and the recipe does not say which dimension of "
                "its batches is the sequence: give it parallel=drivetrain.Parallel(sequence={NAME: "
                "DIMENSION}), or set backend.context=1"
            )
        self.computes_whole = False
        """True while every rank computes whole sequences of its own, without `attention`."""

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            # of its own, since recomputation may run in any thread
            attention = nullcontext() if self.computes_whole else UlyssesAttention(group)
            return nullcontext(), attention

        self.recompute = partial(checkpoint, use_reentrant=False, context_fn=contexts)

    def microbatch(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.computes_whole else self.attention

    def part(self, batch: Batch) -> Batch:
        """Return this rank's part of a batch."""
        return self._part(batch, self._length(batch))

    def whole_and_part(self, batch: Any) -> tuple[Batch, Batch]:
        """Return the beginning of a batch, whole, and this rank's part of that beginning."""
        short = min(self._length(batch), _CHECKED_POSITIONS * self.size)
        whole = self._positions(batch, 0, short)
        return whole, self._part(whole, short)

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Let every rank compute whole sequences within the block."""
        self.computes_whole = True
        try:
            yield
        finally:
            self.computes_whole = False

    def _length(self, batch: Batch) -> int:
        """Return the length of the batch's sequences. Raises `DataError` if they cannot be
        partitioned.
        """
        dimensions = self.parallel.sequence
        if not isinstance(batch, Mapping) or not dimensions.keys() & batch.keys():
            seen = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise DataError(
                f"Parallel.sequence names {', '.join(dimensions)}, and the batch is {seen}: let "
                "`collate` return a dict with these names"
            )
        found = {name: batch[name].shape[dim] for name, dim in dimensions.items() if name in batch}
        if len(set(found.values())) > 1:
            raise DataError(f"the sequences of a batch differ in length: {found}")
        length: int = next(iter(found.values()))
        if length % self.size:
            more = -length % self.size
            raise DataError(
                f"sequences of {length} positions cannot be split for backend.context={self.size}: "
                f"pad them to {length + more}, with a loss of 0 there, or drop {length % self.size}"
            )
        return length

    def _part(self, batch: Any, length: int) -> Batch:
        """Return this rank's share of the batch's `length` positions."""
        own = length // self.size
        return self._positions(batch, self.index * own, own)

    def _positions(self, batch: Any, start: int, length: int) -> Batch:
        """Return `length` positions of the batch from `start` on."""
        chosen = dict(batch)
        dimensions = dict(self.parallel.sequence)
        if positions := self.parallel.positions:
            chosen.setdefault(positions, torch.arange(start + length)[None])
            dimensions.setdefault(positions, 1)
        for name, dim in dimensions.items():
            if name in chosen:
                chosen[name] = chosen[name].narrow(dim, start, length).contiguous()
        return chosen

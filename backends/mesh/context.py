"""Sequences that are cut over ranks, and attention over all of them.

The way of DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509): outside of attention each rank
computes its part of the positions with all heads; for attention ranks exchange, so that each has
all positions of its part of the heads. The model is not changed: what it calls is
`scaled_dot_product_attention`. Shapes: B sequences, H heads of size D, T positions, t of them on
this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...data.parallel import Parallel
from ...kernel.errors import CapabilityRefused, DataError, RecipeError
from ...kernel.plan import Plan
from ...kernel.recipe import Batch, Recipe
from ..common import prefetch
from ..process_group.collectives import keep_for_a_while
from .comparing import alike, evaluating, loss_to_compare

__all__ = ["SequenceParts", "WholeAttention"]

_ATTENTION = F.scaled_dot_product_attention
_CHECKED_POSITIONS = 64
"""Of each rank, in the comparison with whole sequences."""


class _Exchange(torch.autograd.Function):
    """Each rank gives part i of dimension `cut` to rank i, and joins what it is given along
    `joined`; backward goes the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cut: int, joined: int, group: Any) -> Tensor:
        ctx.way = joined, cut, group
        size = dist.get_world_size(group)
        sent = torch.stack([part.contiguous() for part in tensor.chunk(size, cut)])
        taken = torch.empty_like(sent)
        dist.all_to_all_single(keep_for_a_while(taken), keep_for_a_while(sent), group=group)
        return torch.cat(taken.unbind(0), joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        way = cast(Any, _Exchange.apply)
        return way(gradients[0], *ctx.way), None, None, None


class _Gather(torch.autograd.Function):
    """All ranks' parts of dimension -2, joined; its gradient is added up over ranks."""

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


class WholeAttention(TorchFunctionMode):
    """While it is entered, `scaled_dot_product_attention` sees all positions."""

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
        """(B, H, t, D) each, of key and value maybe fewer heads."""
        if attn_mask is not None:
            _refuse("an attention mask, which is of this rank's positions", "without a mask")
        if query.shape[-2] != key.shape[-2]:
            _refuse(
                f"attention of {query.shape[-2]} positions to {key.shape[-2]} others",
                "attending to their own sequence",
            )
        # nothing that is called from here may come back to a mode, this one or another like it
        with torch._C.DisableTorchFunction():
            heads = [tensor.shape[-3] if tensor.dim() > 3 else 1 for tensor in (query, key)]
            if any(number % self.size for number in heads):
                return self._on_gathered(query, key, value, is_causal, dropout_p=dropout_p, **more)
            exchange = cast(Any, _Exchange.apply)
            q, k, v = (exchange(each, -3, -2, self.group) for each in (query, key, value))
            mixed = _ATTENTION(q, k, v, dropout_p=dropout_p, is_causal=is_causal, **more)
            return cast(Tensor, exchange(mixed, -2, -3, self.group))

    def _on_gathered(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, **more: Any
    ) -> Tensor:
        """Of this rank's positions to all."""
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
        f"sequences are cut over ranks. Train a model that calls attention {remedy} "
        "(`is_causal=True`), or set backend.context=1",
    )


class SequenceParts:
    """This rank's part of the sequences of batches."""

    def __init__(self, recipe: Recipe, plan: Plan, group: Any, device: torch.device) -> None:
        self.plan, self.group, self.device = plan, group, device
        self.size, self.index = dist.get_world_size(group), dist.get_rank(group)
        self.attention = WholeAttention(group)
        self.parallel: Parallel = recipe.parallel or Parallel()
        if not self.parallel.sequence:
            raise RecipeError(
                f"backend.context is {self.size}, and the recipe does not say which dimension of "
                "its batches is the sequence: give it parallel=drivetrain.Parallel(sequence={NAME: "
                "DIMENSION}), or set backend.context=1"
            )
        self._compared_by = loss_to_compare(recipe, plan)

    def part(
        self,
        batch: Batch,
        module: nn.Module,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> Batch:
        """Of a batch; the first is used to compare the losses of parts and whole."""
        length = self._length(batch)
        if self._compared_by is not None:
            self._compare(self._compared_by, batch, length, module, autocast)
            self._compared_by = None
        return self._part(batch, length)

    def _length(self, batch: Batch) -> int:
        """Of its sequences. Raises `DataError` where it cannot be cut."""
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
                f"sequences of {length} positions cannot be cut for backend.context={self.size}: "
                f"pad them to {length + more}, with a loss of 0 there, or drop {length % self.size}"
            )
        return length

    def _part(self, batch: Any, length: int) -> Batch:
        """This rank's positions, of that many."""
        taken = length // self.size
        return self._positions(batch, self.index * taken, taken)

    def _positions(self, batch: Any, start: int, taken: int) -> Batch:
        """So many positions."""
        cut = dict(batch)
        dimensions = dict(self.parallel.sequence)
        if positions := self.parallel.positions:
            cut.setdefault(positions, torch.arange(start + taken)[None])
            dimensions.setdefault(positions, 1)
        for name, dim in dimensions.items():
            if name in cut:
                cut[name] = cut[name].narrow(dim, start, taken).contiguous()
        return cut

    @torch.no_grad()
    def _compare(
        self,
        loss: Callable[[nn.Module, Batch], Tensor],
        batch: Any,
        length: int,
        module: nn.Module,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Raises `RecipeError` where the parts' losses do not add up to that of the whole."""
        short = min(length, _CHECKED_POSITIONS * self.size)
        whole = self._positions(batch, 0, short)
        part = self._part(whole, short)
        with evaluating(module, self.device), autocast():
            of_whole = loss(module, prefetch.move(whole, self.device))
        with evaluating(module, self.device), autocast(), self.attention:
            of_part = loss(module, prefetch.move(part, self.device))
        total = of_part.detach().double().clone()
        dist.all_reduce(keep_for_a_while(total), group=self.group)
        seen, expected = float(total), float(of_whole)
        if not alike(seen, expected, self.plan):
            raise RecipeError(
                f"with backend.context={self.size} the losses of the parts of a batch add up to "
                f"{seen:.6g}, and that of the whole is {expected:.6g} (the first {short} "
                "positions, in evaluation mode). Each part must know its positions "
                "(Parallel.positions, given to the model), targets must be shifted before the "
                "batch is cut, the loss must be a sum over positions that draws nothing by chance "
                "(collate may), and positions may meet in scaled_dot_product_attention only"
            )

"""Cross entropy of logits that stay partitioned over the vocabulary, so that no rank has all."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from ...kernel.errors import RecipeError
from ..fsdp import dtensor
from ..process_group.collectives import keep_for_a_while

__all__ = ["VocabParallelLoss", "gather_without_gradient", "refuse_partitioned_loss"]


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of each of N rows, (N,). Each rank has the columns from `first` on of the
    logits, (N, V / ranks), in at least fp32. Three numbers of each row travel.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, targets: Tensor, first: int, group: Any) -> Tensor:
        largest = own.amax(-1)
        dist.all_reduce(keep_for_a_while(largest), dist.ReduceOp.MAX, group=group)
        probabilities = (own - largest[:, None]).exp()
        inside = (targets >= first) & (targets < first + own.shape[-1])
        index = (targets - first).clamp(0, own.shape[-1] - 1)[:, None]
        target_logits = (own.gather(-1, index)[:, 0] - largest).where(inside, 0)
        sums = torch.stack([probabilities.sum(-1), target_logits])
        dist.all_reduce(keep_for_a_while(sums), group=group)
        ctx.save_for_backward(probabilities.div_(sums[0][:, None]), index, inside)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (probabilities, index, inside) = gradients, ctx.saved_tensors
        own = probabilities * gradient[:, None]
        own.scatter_add_(-1, index, -(gradient * inside)[:, None])
        return own, None, None, None


class VocabParallelLoss(TorchFunctionMode):
    """Within the block, `cross_entropy` accepts logits that are partitioned by their classes."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if function is not F.cross_entropy or not isinstance(_logits(*args, **given), DTensor):
            return function(*args, **given)
        return self._cross_entropy(*args, **given)

    def _cross_entropy(
        self,
        input: DTensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """See `torch.nn.functional.cross_entropy`."""
        classes = 1 if input.dim() > 1 else 0
        plain = weight is None and size_average is None and reduce is None and not label_smoothing
        if not plain or target.is_floating_point() or input.placements != (Shard(classes),):
            return F.cross_entropy(
                input.full_tensor(), target, weight, size_average, ignore_index, reduce, reduction,
                label_smoothing,
            )  # fmt: skip
        first = dtensor.own_box(input).offsets[classes]
        own = input.to_local().movedim(classes, -1)
        rows = own.reshape(-1, own.shape[-1])
        if rows.element_size() < 4:
            rows = rows.float()
        labels = target.reshape(-1)
        group = input.device_mesh.get_group()
        each = cast(Tensor, cast(Any, _CrossEntropy.apply)(rows, labels, first, group))
        counted = labels != ignore_index
        each = each.where(counted, 0)
        if reduction == "none":
            return each.reshape(target.shape)
        return each.sum() if reduction == "sum" else each.sum() / counted.sum()


def _logits(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else kwargs.get("input")


def gather_without_gradient(module: Any, args: Any, logits: DTensor) -> Tensor:
    """Hook of a head: without gradients, as in evaluation and prediction, return whole logits."""
    return logits if torch.is_grad_enabled() else logits.full_tensor()


def refuse_partitioned_loss(loss: Tensor) -> None:
    """Raise `RecipeError` for a loss made of partitioned logits by another function than
    `cross_entropy`.
    """
    if isinstance(loss, DTensor):
        raise RecipeError(
            "Parallel.tensor partitions the head by 'logits', and the loss is computed from them "
            "by another function than torch.nn.functional.cross_entropy: use cross_entropy, or "
            "partition the head by 'vocabulary', which gives each rank all logits"
        )

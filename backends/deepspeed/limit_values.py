"""A limit of each element of the gradient, which DeepSpeed has not."""

from __future__ import annotations

from typing import Any

from ..common import stepping
from .zero_state import partitions_weights

__all__ = ["limit_values"]


def limit_values(zero: Any, limit: float) -> None:
    """Have the optimizer of ZeRO limit each element of its partition of the gradient to [-limit,
    limit], right after it has divided that partition by the loss scale and clipped it by norm."""
    scale_down = zero.unscale_and_clip_grads

    def clip(gradients: Any, total_norm: Any) -> None:
        scale_down(gradients, total_norm)
        if partitions_weights(zero):  # it is given the number of a group
            gradients = [zero.fp32_partitioned_groups_flat[gradients].grad]
        for held in gradients:
            stepping.limit_values(held if isinstance(held, list) else [held], limit)

    zero.unscale_and_clip_grads = clip

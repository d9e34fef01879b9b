"""Cross entropy against labels that are softened: https://arxiv.org/abs/1512.00567, section 7."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["LabelSmoother"]


@dataclass
class LabelSmoother:
    """(1 - epsilon) x the loss against the labels + epsilon x the mean loss against all classes.

    Positions whose label is `ignore_index` do not count.
    """

    epsilon: float = 0.1
    ignore_index: int = -100

    def __call__(
        self,
        model_output: Any,
        labels: Tensor,
        shift_labels: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """The loss, a scalar, float32.

        `model_output`: a mapping with "logits", or a sequence that begins with them; logits of
        shape (..., classes). `labels`: integers of shape (...). `shift_labels`: each position
        predicts the label of the next one. `num_items_in_batch`: what the sum is divided by,
        instead of the number of positions that count.
        """
        is_mapping = isinstance(model_output, Mapping)
        logits: Tensor = model_output["logits"] if is_mapping else model_output[0]
        if shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        if labels.dim() == logits.dim():  # a last dimension of one label each
            labels = labels.squeeze(-1)
        surprise = -torch.log_softmax(logits, dim=-1)
        counts = labels != self.ignore_index
        hit = surprise.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        every = surprise.sum(-1, dtype=torch.float32)
        items = counts.sum() if num_items_in_batch is None else num_items_in_batch
        if isinstance(items, Tensor):
            items = items.to(logits.device)
        against_labels = hit.masked_fill(~counts, 0.0).sum() / items
        against_all = every.masked_fill(~counts, 0.0).sum() / (items * logits.shape[-1])
        return (1 - self.epsilon) * against_labels + self.epsilon * against_all

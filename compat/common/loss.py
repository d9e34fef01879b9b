"""The loss in a model's outputs, the items that it is divided by, and label smoothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .inspection import unwrap_peft

__all__ = [
    "LabelSmoother",
    "count_items",
    "is_causal_lm",
    "loss_of",
    "loss_shifts_labels",
    "require_names",
]

_IGNORED = -100


def require_names(inputs: Any, method: str) -> None:
    """Raises TypeError for a batch that cannot be passed to a model as keywords."""
    if not hasattr(inputs, "keys"):
        raise TypeError(
            f"the batch is a {type(inputs).__name__}, whose parts have no names by which "
            f"Trainer.{method} could give them to the model: return a dict from data_collator, or "
            f"override {method} and call the model with the batch as it is"
        )


def count_items(batches: Sequence[Any], shifts_labels: bool) -> Tensor | None:
    """Count the labels in the batches of one update that are not -100.

    `shifts_labels`: each position predicts the next label, so the first label is not counted. A
    batch's `shift_labels`, if present, are all counted. Return a 0-d int64 tensor on the labels'
    device; None if there are no batches, no labels, or none that can be counted.
    """
    if not batches or not hasattr(batches[0], "__contains__") or "labels" not in batches[0]:
        return None
    total: Any = 0
    for batch in batches:
        labels = batch["labels"]
        if "shift_labels" in batch:
            labels = batch["shift_labels"]
        elif shifts_labels and isinstance(labels, Tensor):
            labels = labels[..., 1:]
        if not isinstance(labels, Tensor):  # lists of dicts, as in object detection
            return None
        total = total + (labels != _IGNORED).sum()
    return total  # type: ignore[no-any-return]


def loss_shifts_labels(model: nn.Module) -> bool:
    """True if the model's own loss compares each position with the next label.

    True for models of transformers with the causal loss, unless they are encoder-decoders.
    """
    model = unwrap_peft(model)
    kind = getattr(model, "loss_type", None)
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if kind is None or encodes or "transformers" not in sys.modules:
        return False
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    return LOSS_MAPPING.get(kind) is ForCausalLMLoss


def is_causal_lm(model: nn.Module) -> bool:
    """True if transformers lists the model's class as a causal language model, or a base class of
    it: drivers may derive a class, as FSDP does."""
    if "transformers" not in sys.modules:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    kind = type(unwrap_peft(model))
    return kind.__name__.removeprefix("FSDP") in names


def loss_of(outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
    """Return the loss in a model's outputs: `outputs["loss"]` of a mapping, else `outputs[0]`.

    Raises ValueError, naming outputs and inputs, if a mapping has no loss.
    """
    if not isinstance(outputs, Mapping):
        return outputs[0]  # type: ignore[no-any-return]
    if "loss" not in outputs:
        raise ValueError(
            f"the model returned no loss, but {', '.join(outputs) or 'nothing'}, of the inputs"
            f" {', '.join(inputs)}. It may need labels: see label_names and"
            " remove_unused_columns; or give the trainer compute_loss_func="
        )
    loss: Tensor = outputs["loss"]
    return loss


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
        """Return the loss, a float32 scalar.

        `model_output`: a mapping with "logits", or a sequence that begins with them; logits of
        shape (..., classes). `labels`: integers of shape (...). `shift_labels`: each position
        predicts the label of the next one. `num_items_in_batch`: the divisor of the sum, instead of
        the number of positions that count.
        """
        is_mapping = isinstance(model_output, Mapping)
        logits: Tensor = model_output["logits"] if is_mapping else model_output[0]
        if shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        if labels.dim() == logits.dim():  # add a last dimension of size 1
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

"""What a loss is taken of, and what it is divided by."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .inspection import unwrap_peft

__all__ = ["count_items", "is_causal_lm", "loss_of", "loss_shifts_labels"]

_IGNORED = -100


def count_items(batches: Sequence[Any], shifts_labels: bool) -> Tensor | None:
    """The labels in the batches of one update that count: those that are not -100.

    `shifts_labels`: each position predicts the next one's label, so the first one's is not
    counted. Where a batch has `shift_labels`, these are counted as they are. A 0-d int64 tensor
    where the labels lie; None where there are no batches, no labels, or none that can be counted.
    """
    if not batches or "labels" not in batches[0]:
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
    """Whether the model's own loss compares each position with the label of the next one.

    True for models of transformers whose loss is the causal one, unless they encode as well.
    """
    model = unwrap_peft(model)
    kind = getattr(model, "loss_type", None)
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if kind is None or encodes or "transformers" not in sys.modules:
        return False
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    return LOSS_MAPPING.get(kind) is ForCausalLMLoss


def is_causal_lm(model: nn.Module) -> bool:
    """Whether transformers lists the model's class as one that predicts the next token."""
    if "transformers" not in sys.modules:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return type(unwrap_peft(model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def loss_of(outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
    """The loss in a model's outputs: `outputs["loss"]` of a mapping, else `outputs[0]`.

    Raises ValueError, naming what came back and what went in, where a mapping has none.
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

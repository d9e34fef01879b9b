"""Reads from a model's `forward` which inputs and labels it takes."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import nn

__all__ = [
    "accepted_columns",
    "can_return_loss",
    "find_labels",
    "is_peft_model",
    "model_accepts_loss_kwargs",
    "unwrap_peft",
]


def is_peft_model(model: Any) -> bool:
    """True if PEFT wrapped the model. PEFT is not imported for this check."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, (peft.PeftModel, peft.PeftMixedModel))


def unwrap_peft(model: nn.Module) -> nn.Module:
    """Return the model inside of PEFT's wrapper, or the model itself."""
    if not is_peft_model(model):
        return model
    if hasattr(model, "get_base_model"):
        base: nn.Module = model.get_base_model()  # type: ignore[operator]
    else:  # a mixed model has no such method
        base = model.base_model.model  # type: ignore[union-attr, assignment]
    return base


def accepted_columns(model: nn.Module, label_names: list[str]) -> list[str]:
    """Return the names that a sample of this model may have: the parameters of `forward`, and the
    labels."""
    parameters = list(inspect.signature(unwrap_peft(model).forward).parameters)
    labels = dict.fromkeys(["label", "label_ids", *label_names])
    return [*parameters, *(name for name in labels if name not in parameters)]


def find_labels(model_class: type) -> list[str]:
    """Return the parameters of `forward` that are labels, by their names."""
    names = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    also = ("start_positions", "end_positions")
    answers_questions = "QuestionAnswering" in model_class.__name__
    return [name for name in names if "label" in name or (answers_questions and name in also)]


def can_return_loss(model_class: type) -> bool:
    """True if `forward` can return a loss without labels: its parameter `return_loss` is True by
    default."""
    names = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    return "return_loss" in names and names["return_loss"].default is True


def model_accepts_loss_kwargs(model: nn.Module) -> bool:
    """True if `forward` accepts the number of items to divide its loss by.

    The model declares this by `accepts_loss_kwargs`, or accepts any keyword.
    """
    model = unwrap_peft(model)
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

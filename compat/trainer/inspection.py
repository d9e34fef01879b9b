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
    """True if PEFT wrapped the model; False without a look where PEFT is not imported."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, (peft.PeftModel, peft.PeftMixedModel))


def unwrap_peft(model: nn.Module) -> nn.Module:
    """The model below PEFT's wrapper, or the model itself."""
    if not is_peft_model(model):
        return model
    if hasattr(model, "get_base_model"):
        base: nn.Module = model.get_base_model()  # type: ignore[operator]
    else:  # a mixed model has no such method
        base = model.base_model.model  # type: ignore[union-attr, assignment]
    return base


def accepted_columns(model: nn.Module, label_names: list[str]) -> list[str]:
    """The names that a sample of this model may have: what `forward` takes, and the labels."""
    parameters = list(inspect.signature(unwrap_peft(model).forward).parameters)
    labels = dict.fromkeys(["label", "label_ids", *label_names])
    return [*parameters, *(name for name in labels if name not in parameters)]


def find_labels(model_class: type) -> list[str]:
    """The parameters of `forward` that are labels, judged by their names."""
    names = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    also = ("start_positions", "end_positions")
    answers_questions = "QuestionAnswering" in model_class.__name__
    return [name for name in names if "label" in name or (answers_questions and name in also)]


def can_return_loss(model_class: type) -> bool:
    """True if `forward` returns a loss without labels: it has `return_loss=True`."""
    names = inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    return "return_loss" in names and names["return_loss"].default is True


def model_accepts_loss_kwargs(model: nn.Module) -> bool:
    """True if `forward` can be told the number of items to divide its loss by.

    It says so itself by `accepts_loss_kwargs`, or takes any keyword.
    """
    model = unwrap_peft(model)
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

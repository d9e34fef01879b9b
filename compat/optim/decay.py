"""Which parameters decay: all but biases and what belongs to normalisation."""

from __future__ import annotations

from typing import Any

from torch import nn

from .parameter_names import get_parameter_names

__all__ = ["decay_groups", "decayed_names"]

_NOT_DECAYED = ["bias", "layernorm", "rmsnorm", r"(?:^|\.|_)norm(?:$|\.)"]
"""Patterns in names."""


def decayed_names(model: nn.Module, by_name: bool = True) -> list[str]:
    """The names of the parameters that weight decay applies to, frozen ones too.

    Left out are those of `nn.LayerNorm`, and those whose name speaks of a bias or a norm. Unless
    `by_name`, names do not count but for "bias", and classes called RMSNorm do.
    """
    if not by_name:
        kinds = {type(module) for module in model.modules()}
        norms = {kind for kind in kinds if kind.__name__.endswith("RMSNorm")}
        return get_parameter_names(model, {nn.LayerNorm, *norms}, ["bias"])
    return get_parameter_names(model, [nn.LayerNorm], _NOT_DECAYED)


def decay_groups(model: nn.Module, decayed: list[str], weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups of what is trained: with decay, and without."""
    names = set(decayed)
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    return [
        {"params": [one for name, one in trained if name in names], "weight_decay": weight_decay},
        {"params": [one for name, one in trained if name not in names], "weight_decay": 0.0},
    ]

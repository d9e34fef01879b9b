"""Counting and naming a model's parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

__all__ = ["get_model_param_count", "get_parameter_names"]


def get_model_param_count(model: nn.Module, trainable_only: bool = False) -> int:
    """Elements of all parameters, each counted once; under ZeRO-3 of the whole ones."""
    return sum(
        int(getattr(parameter, "ds_numel", parameter.numel()))
        for parameter in model.parameters()
        if parameter.requires_grad or not trainable_only
    )


def get_parameter_names(
    model: nn.Module,
    forbidden_layer_types: Iterable[type[nn.Module]],
    forbidden_layer_names: Iterable[str] | None = None,
) -> list[str]:
    """Names of the parameters that lie in no submodule of these types, and match no such pattern.

    `forbidden_layer_names`: regular expressions, searched for in the lower-case name at each
    level from the parameter's own up to the full one. Tied parameters appear by each name.
    """
    types = tuple(forbidden_layer_types)
    patterns = [re.compile(name) for name in forbidden_layer_names or ()]

    def allowed(name: str) -> bool:
        return not any(pattern.search(name.lower()) for pattern in patterns)

    def below(module: nn.Module) -> list[str]:
        names = [
            f"{child_name}.{name}"
            for child_name, child in module.named_children()
            if not isinstance(child, types)
            for name in below(child)
        ]
        return [name for name in (*names, *module._parameters) if allowed(name)]

    return below(model)

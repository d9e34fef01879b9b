"""A model's parameters: counted, named, and grouped by whether they decay."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

__all__ = [
    "decay_groups",
    "decayed_names",
    "get_model_param_count",
    "get_parameter_names",
    "hyper_parameters",
]


def get_model_param_count(model: nn.Module, trainable_only: bool = False) -> int:
    """Count the elements of all parameters, each once; under ZeRO-3 those of the whole
    parameters."""
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
    """Return the names of the parameters outside of submodules of these types whose names match no
    pattern.

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


_NOT_DECAYED = ["bias", "layernorm", "rmsnorm", r"(?:^|\.|_)norm(?:$|\.)"]
"""Patterns in names."""


def decayed_names(model: nn.Module, by_name: bool = True) -> list[str]:
    """Return the names of the parameters that weight decay applies to, including frozen ones.

    Parameters of `nn.LayerNorm` are left out, and parameters whose name contains a bias or a norm.
    Without `by_name`, only "bias" counts among names, and classes called RMSNorm are left out, too.
    """
    if not by_name:
        kinds = {type(module) for module in model.modules()}
        norms = {kind for kind in kinds if kind.__name__.endswith("RMSNorm")}
        return get_parameter_names(model, {nn.LayerNorm, *norms}, ["bias"])
    return get_parameter_names(model, [nn.LayerNorm], _NOT_DECAYED)


def decay_groups(model: nn.Module, decayed: list[str], weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups of the trained parameters: with decay, and without."""
    names = set(decayed)
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    return [
        {"params": [one for name, one in trained if name in names], "weight_decay": weight_decay},
        {"params": [one for name, one in trained if name not in names], "weight_decay": 0.0},
    ]


_HOW = ("capturable", "differentiable", "foreach", "fused")
"""Entries of an optimizer's group about how to compute, which the driver decides."""


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and strings in an optimizer's group."""
    found = {}
    for name, value in group.items():
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        parts = value if isinstance(value, list | tuple) else [value]
        if name not in ("params", *_HOW) and all(
            part is None or isinstance(part, bool | int | float | str) for part in parts
        ):
            found[name] = value
    return found

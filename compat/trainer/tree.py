"""Moves batches, whatever they are made of, and models to a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["map_tensors", "move", "move_model"]


def map_tensors(function: Callable[[Tensor], Tensor], data: Any) -> Any:
    """The same mappings, lists and tuples, with the function applied to each tensor in them.

    Containers keep their type, named tuples too; everything else is passed on as it is.
    """
    if isinstance(data, Tensor):
        return function(data)
    # a dict is the usual case; to ask whether it is a `Mapping` takes longer
    if type(data) is dict or isinstance(data, Mapping):
        return type(data)({key: map_tensors(function, value) for key, value in data.items()})  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(function, value) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(map_tensors(function, value) for value in data)
    return data


def move(data: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The batch on `device`; floating and complex tensors cast to `dtype`, unless it is None."""

    def place(tensor: Tensor) -> Tensor:
        if dtype is None:
            return tensor if tensor.device == device else tensor.to(device)
        floating = tensor.is_floating_point() or tensor.is_complex()
        return tensor.to(device=device, dtype=dtype if floating else None)

    return map_tensors(place, data)


def move_model(model: nn.Module, device: torch.device) -> None:
    """Move a model, in place; weights that several layers share stay shared, which on XLA they
    would not: there each layer gets a parameter of its own.
    """
    users: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(name)
    model.to(device)
    for first, *others in users.values():
        shared = model.get_parameter(first)
        for name in others:
            layer, _, last = name.rpartition(".")
            if model.get_parameter(name) is not shared:
                setattr(model.get_submodule(layer), last, shared)

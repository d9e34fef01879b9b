"""Mappings, lists and tuples of tensors, as one: walked through, mapped, moved to a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["leaves", "map_tensors", "move", "move_model", "nested_map"]


def nested_map(function: Callable[..., Any], *nests: Any) -> Any:
    """`function` of every leaf, in containers of the same kind; of several nests of one shape,
    leaf by leaf. Raises TypeError where their containers differ, ValueError where lengths do.
    """
    first = nests[0]
    if len(nests) == 1:
        return _map(function, first)
    if not any(isinstance(nest, Mapping | list | tuple) for nest in nests):
        return function(*nests)
    if any(type(nest) is not type(first) for nest in nests):
        raise TypeError(f"nests differ: {', '.join(type(n).__name__ for n in nests)}")
    if isinstance(first, Mapping):
        parts = {key: nested_map(function, *(nest[key] for nest in nests)) for key in first}
        return type(first)(parts)  # type: ignore[call-arg]
    return _like(first, (nested_map(function, *each) for each in zip(*nests, strict=True)))


def _map(function: Callable[[Any], Any], nest: Any) -> Any:
    if isinstance(nest, Tensor):
        return function(nest)
    # a dict is the usual case; to ask whether it is a `Mapping` takes longer
    if type(nest) is dict or isinstance(nest, Mapping):
        return type(nest)({key: _map(function, value) for key, value in nest.items()})  # type: ignore[call-arg]
    if isinstance(nest, list | tuple):
        return _like(nest, (_map(function, value) for value in nest))
    return function(nest)


def _like(container: Any, parts: Iterator[Any]) -> Any:
    """A list or tuple of the same type, named tuples too."""
    kind = type(container)
    return kind(*parts) if hasattr(container, "_fields") else kind(parts)


def map_tensors(function: Callable[[Tensor], Tensor], data: Any) -> Any:
    """`nested_map` of the tensors in it; everything else is passed on as it is."""
    return _map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, data)


def leaves(nest: Any) -> Iterator[Any]:
    """The leaves of nested mappings, lists and tuples, in order."""
    if isinstance(nest, Mapping):
        nest = tuple(nest.values())
    if not isinstance(nest, list | tuple):
        yield nest
        return
    for part in nest:
        yield from leaves(part)


def move(data: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The batch on `device`; floating and complex tensors cast to `dtype`, unless it is None."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if dtype is None:
            return leaf if leaf.device == device else leaf.to(device)
        floating = leaf.is_floating_point() or leaf.is_complex()
        return leaf.to(device=device, dtype=dtype if floating else None)

    return _map(moved, data)


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

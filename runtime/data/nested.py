"""Nested batches and outputs: mappings, lists and tuples of tensors and other leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "can_be_moved",
    "leaves",
    "like",
    "map_leaves",
    "map_tensors",
    "named_leaves",
    "num_bytes",
    "tensors_of",
]


def map_leaves(function: Callable[[Any], Any], nest: Any, *, dicts: bool = False) -> Any:
    """Apply `function` to every leaf, in containers of the same types; with `dicts`, mappings
    become plain dicts."""
    if isinstance(nest, Tensor):  # the fastest checks come first
        return function(nest)
    if isinstance(nest, (list, tuple)):
        return like(nest, [map_leaves(function, part, dicts=dicts) for part in nest])
    if type(nest) is dict or isinstance(nest, Mapping):
        changed = {key: map_leaves(function, part, dicts=dicts) for key, part in nest.items()}
        return changed if dicts or type(nest) is dict else type(nest)(changed)  # type: ignore[call-arg]
    return function(nest)


def like(container: Any, parts: Iterable[Any]) -> Any:
    """Make a list or tuple of the container's type, named tuples included."""
    kind = type(container)
    return kind(*parts) if hasattr(container, "_fields") else kind(parts)


def map_tensors(function: Callable[[Tensor], Any], nest: Any) -> Any:
    """Apply `function` to the tensors, as `map_leaves` does; other leaves are unchanged."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, nest)


def num_bytes(nest: Any) -> int:
    """Return the bytes of the dense tensors."""
    return sum(each.nbytes for each in tensors_of(nest) if each.layout == torch.strided)


def can_be_moved(leaf: Any) -> bool:
    """True for an object, such as a graph, that has a method `to` and is not a tensor."""
    return not isinstance(leaf, Tensor) and callable(getattr(leaf, "to", None))


def leaves(nest: Any) -> Iterator[Any]:
    """Return the leaves, in order."""
    return (leaf for _, leaf in named_leaves(nest))


def tensors_of(nest: Any) -> Iterator[Tensor]:
    """Return the leaves that are tensors, in order."""
    return (leaf for leaf in leaves(nest) if isinstance(leaf, Tensor))


def named_leaves(nest: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the leaves in order, each with its path of keys and indices."""
    parts: Iterable[tuple[Any, Any]]
    if isinstance(nest, list | tuple):
        parts = enumerate(nest)
    elif isinstance(nest, Mapping):
        parts = nest.items()
    else:
        yield path, nest
        return
    for key, part in parts:
        yield from named_leaves(part, (*path, key))

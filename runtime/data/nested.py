"""Nested batches and outputs: mappings, lists and tuples of tensors and other leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["leaves", "like", "map_leaves", "map_tensors", "named_leaves", "tensors_of"]


def map_leaves(function: Callable[[Any], Any], nest: Any, *, dicts: bool = False) -> Any:
    """`function` of every leaf, in containers of the same types; with `dicts`, mappings become
    plain dicts."""
    if isinstance(nest, Tensor):  # asked in the order of what is quick to find out
        return function(nest)
    if isinstance(nest, (list, tuple)):
        return like(nest, [map_leaves(function, part, dicts=dicts) for part in nest])
    if type(nest) is dict or isinstance(nest, Mapping):
        changed = {key: map_leaves(function, part, dicts=dicts) for key, part in nest.items()}
        return changed if dicts or type(nest) is dict else type(nest)(changed)  # type: ignore[call-arg]
    return function(nest)


def like(container: Any, parts: Iterable[Any]) -> Any:
    """A list or tuple of the container's type, named tuples too."""
    kind = type(container)
    return kind(*parts) if hasattr(container, "_fields") else kind(parts)


def map_tensors(function: Callable[[Tensor], Any], nest: Any) -> Any:
    """`map_leaves` of the tensors; other leaves stay as they are."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, nest)


def leaves(nest: Any) -> Iterator[Any]:
    """The leaves, in order."""
    return (leaf for _, leaf in named_leaves(nest))


def tensors_of(nest: Any) -> Iterator[Tensor]:
    """The leaves that are tensors, in order."""
    return (leaf for leaf in leaves(nest) if isinstance(leaf, Tensor))


def named_leaves(nest: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves in order, each with the keys and indices that lead to it."""
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

"""Nested outputs of a model: tensors in mappings, lists and tuples, a row for each sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernel.errors import RecipeError

__all__ = ["join", "leaves", "rebuild"]


def leaves(outputs: Any, num_rows: int | None = None) -> dict[str, Tensor]:
    """The tensors by their path, such as `logits` or `hidden.0`; what is None is left out.

    Raises `RecipeError` for anything else in them, for none, and unless all have equally many rows
    (`num_rows`, where that is said).
    """
    found: dict[str, Tensor] = {}
    _collect(outputs, "", found)
    if num_rows and found:  # the usual case, for each batch
        for tensor in found.values():
            if tensor.ndim == 0 or tensor.shape[0] != num_rows:
                break
        else:
            return found
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in found.values()}
    if len(sizes) != 1 or None in sizes or num_rows not in {None, *sizes}:
        shapes = {path: tuple(tensor.shape) for path, tensor in found.items()}
        batch = "" if num_rows is None else f" for a batch of {num_rows}"
        raise RecipeError(
            f"the outputs are tensors of shapes {shapes}{batch}; each must have one row for each "
            "sample of the batch, as its first dimension"
        )
    return found


def _collect(value: Any, path: str, found: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        found[path] = value
    elif isinstance(value, (list, tuple)):  # asked before what takes longer to find out
        for index, part in enumerate(value):
            _collect(part, f"{path}.{index}" if path else str(index), found)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            _collect(part, f"{path}.{key}" if path else str(key), found)
    elif value is not None:
        raise RecipeError(
            f"the output {path!r} is a {type(value).__name__}; outputs are tensors, or dicts, "
            "lists and tuples of tensors"
        )


def rebuild(outputs: Any, tensors: Sequence[Tensor]) -> Any:
    """The structure of `outputs` with other tensors, in the order of `leaves`. Mappings become
    dicts."""
    return _rebuild(outputs, iter(tensors))


def _rebuild(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        return {key: _rebuild(part, tensors) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_rebuild(part, tensors) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_rebuild(part, tensors) for part in value)
    return value


def join(parts: Sequence[Tensor], padding: float, width: int = 0) -> Tensor:
    """One after the other along dimension 0. Where dimension 1 differs, or is below `width`, it
    is filled up with `padding`. Raises `RecipeError` where a later dimension differs.
    """
    first = parts[0]
    beyond = {part.shape[1:] for part in parts}
    if len({(len(shape), shape[1:]) for shape in beyond}) > 1:
        shapes = sorted({tuple(part.shape) for part in parts})
        raise RecipeError(
            f"outputs of shapes {shapes} cannot be joined: sizes may differ in the first two "
            "dimensions only"
        )
    widths = {shape[0] for shape in beyond if shape}
    width = max({width, *widths})
    if widths <= {width}:
        return first if len(parts) == 1 else torch.cat(list(parts))
    joined = first.new_full((sum(map(len, parts)), width, *first.shape[2:]), padding)
    row = 0
    for part in parts:
        joined[row : row + len(part), : part.shape[1]] = part
        row += len(part)
    return joined

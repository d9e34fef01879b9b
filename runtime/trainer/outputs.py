"""Nested outputs of a model: tensors in mappings, lists and tuples, a row for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.nested import map_leaves, named_leaves
from ..kernel.errors import RecipeError

__all__ = ["join", "leaves", "rebuild"]


def leaves(outputs: Any, num_rows: int | None = None) -> dict[str, Tensor]:
    """Return the tensors by their path, such as `logits` or `hidden.0`; None is left out.

    Raises `RecipeError` for any other leaf, for outputs without a tensor, and unless all tensors
    have the same number of rows (`num_rows`, if given).
    """
    found: dict[str, Tensor] = {}
    for path, leaf in named_leaves(outputs):
        name = ".".join(map(str, path))
        if isinstance(leaf, Tensor):
            found[name] = leaf
        elif leaf is not None:
            raise RecipeError(
                f"the output {name!r} is a {type(leaf).__name__}; outputs are tensors, or dicts, "
                "lists and tuples of tensors"
            )
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


def rebuild(outputs: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the structure of `outputs` with other tensors, in the order of `leaves`. Mappings
    become dicts."""
    following = iter(tensors)
    return map_leaves(
        lambda leaf: next(following) if isinstance(leaf, Tensor) else leaf, outputs, dicts=True
    )


def join(parts: Sequence[Tensor], padding: float, width: int = 0) -> Tensor:
    """Concatenate along dimension 0. Dimension 1 is padded with `padding` if it differs or is below
    `width`. Raises `RecipeError` if a later dimension differs.
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

"""A ready microbatch in two halves, for samples that cannot be asked for again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernel.batches import Microbatch
from .nested import leaves, map_leaves

__all__ = ["Halves", "halve"]


class Halves(NamedTuple):
    """An even number of a microbatch's first samples, together and in two halves."""

    whole: Microbatch
    first: Microbatch
    second: Microbatch

    def parts(self, halved: bool) -> list[Microbatch]:
        """Return the two halves, or the whole alone."""
        return [self.first, self.second] if halved else [self.whole]


def halve(part: Microbatch) -> Halves | None:
    """Split a microbatch along the first dimension of its tensors. The last of an odd number of
    samples is left out.

    Return None if the batch cannot be split: it has fewer than two samples, or a leaf that is
    neither a dense tensor of shape (num_samples, ...), nor a 0-d tensor, nor None.
    """
    size = part.num_samples // 2
    rows = [leaf for leaf in leaves(part.batch) if leaf is not None and not _is_scalar(leaf)]
    if not size or not rows or not all(_has_rows(leaf, part.num_samples) for leaf in rows):
        return None
    try:
        return Halves(
            _slice(part, 0, 2 * size), _slice(part, 0, size), _slice(part, size, 2 * size)
        )
    except Exception:  # a container that cannot be built from its parts, such as a defaultdict
        return None


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.dim()


def _has_rows(leaf: Any, number: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and len(leaf) == number


def _slice(part: Microbatch, start: int, stop: int) -> Microbatch:
    def slice_of(leaf: Any) -> Any:
        return leaf if leaf is None or _is_scalar(leaf) else leaf[start:stop]

    batch = map_leaves(slice_of, part.batch)
    return part._replace(batch=batch, num_samples=stop - start, offset=part.offset + start)

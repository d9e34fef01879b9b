"""Samples that a collate function leaves out, such as broken images."""

from __future__ import annotations

from ..kernel.batches import Group, Microbatch, items_of
from ..kernel.recipe import Batch
from .nested import tensors_of

__all__ = ["count_rows", "rows_of"]


def rows_of(batch: Batch) -> int | None:
    """Return the first dimension of a batch's tensors; None if they differ in it, or there are
    none. Tensors of no dimension do not count.
    """
    sizes = {tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def count_rows(group: Group) -> Group:
    """Return the group with the number of its items: the samples of which a row is left. Fetches
    all its microbatches.
    """
    parts = [_counted(part) for part in group.microbatches]
    num_items = sum(items_of(part, None) for part in parts)
    return group._replace(microbatches=iter(parts), num_items=num_items)


def _counted(part: Microbatch) -> Microbatch:
    rows = rows_of(part.batch) if part.num_samples else None
    if rows is None or rows >= part.num_samples * part.repeats:
        return part  # more rows than samples are something else, such as tokens
    return part._replace(num_items=rows / part.repeats)

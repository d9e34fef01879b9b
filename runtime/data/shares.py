"""Selects the source of each draw of a mixture, by a schedule that keeps the shares at any length.

Sources are the leaves of a balanced binary tree. At each node the first n draws are split into
round(n * p) for the left half and the rest for the right half, where p is the left half's share. So
the draws of each source among the first n, and the source of any draw, follow from n alone, and
at every n a source is within half a draw a level of n times its share: 1 draw for four sources.
Independent draws would stray by the root of n, and finding a place in them again would take a
count of all before it.

Rounding multiples of a share is a mechanical word (Lothaire, Algebraic Combinatorics on Words,
chapter 2, https://doi.org/10.1017/CBO9781107326019); the tree makes it one for many sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

import torch
from torch import Tensor

from ..kernel.errors import DataError

__all__ = ["Shares", "shares_of"]

_WHOLE = 1 << 40
"""The resolution of shares: one part in this number."""
_AT_ONCE = 1 << 20
"""Number of draws computed at once; its product with `_WHOLE` stays below 2**63."""


class Shares:
    """The draws of one stage, from 0 on. `quotas`: integers in the ratio of the weights."""

    def __init__(self, quotas: Sequence[int]) -> None:
        self.quotas = tuple(quotas)

    def counts(self, num_draws: int) -> list[int]:
        """Count the draws of each source among the first `num_draws`."""
        return _counts(self.quotas, num_draws)

    def sources(self, first: int, stop: int) -> Tensor:
        """Return the source number of each of these draws."""
        spans = [(start, min(_AT_ONCE, stop - start)) for start in range(first, stop, _AT_ONCE)]
        parts = [_sources(self.quotas, start, count) for start, count in spans]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def shares_of(weights: Mapping[str, float], where: str) -> Shares:
    """Build the draws for weights. Raises `DataError`, naming the source, for an invalid weight."""
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise DataError(f"the weight of source {name!r}{where} is {weight!r}, not a number")
        if not isfinite(weight) or weight < 0:
            raise DataError(
                f"the weight of source {name!r}{where} is {weight}; it must be finite, 0 or more"
            )
    total = sum(weights.values())
    if not total:
        raise DataError(f"the weights of all sources{where} are 0: {', '.join(weights)}")
    quotas = [round(weight / total * _WHOLE) for weight in weights.values()]
    for (name, weight), quota in zip(weights.items(), quotas, strict=True):
        if weight and not quota:
            raise DataError(
                f"the weight of source {name!r}{where} is {weight} of {total}: less than one "
                "sample in 10^12; leave the source out, or raise it"
            )
    return Shares(quotas)


def _counts(quotas: Sequence[int], num_draws: int) -> list[int]:
    if len(quotas) == 1 or not num_draws:
        return [num_draws] + [0] * (len(quotas) - 1)
    left, right = _halves(quotas)
    first = _rounded(num_draws, sum(left), sum(quotas))
    return _counts(left, first) + _counts(right, num_draws - first)


def _sources(quotas: Sequence[int], start: int, count: int) -> Tensor:
    if len(quotas) == 1 or not count:
        return torch.zeros(count, dtype=torch.int64)
    left, right = _halves(quotas)
    share, whole = sum(left), sum(quotas)
    first = _rounded(start, share, whole)
    # what remains of the division at `start` keeps the products below 2**63
    rest = (start * share + whole // 2) % whole
    goes_left = ((torch.arange(count + 1) * share + rest) // whole).diff() > 0
    taken = int(goes_left.sum())
    found = torch.empty(count, dtype=torch.int64)
    found[goes_left] = _sources(left, first, taken)
    found[~goes_left] = _sources(right, start - first, count - taken) + len(left)
    return found


def _halves(quotas: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    half = len(quotas) // 2
    return quotas[:half], quotas[half:]


def _rounded(num_draws: int, share: int, whole: int) -> int:
    return (num_draws * share + whole // 2) // whole

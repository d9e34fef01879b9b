"""Masters of weights in 16 bits, to which user's code writes by way of the weights."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

__all__ = ["ExactMasters"]


class ExactMasters:
    """Masters as they were before the first write since the last update.

    A weight of 16 bits that is written back must not lose what its master had besides.
    """

    def __init__(self) -> None:
        self._before: dict[Hashable, Tensor] = {}

    def updated(self) -> None:
        """Forget them: an update has changed all masters."""
        self._before.clear()

    def take(self, key: Hashable, weight: Tensor, master: Tensor) -> None:
        """Copy a weight, which was written to, into its master."""
        if weight.dtype != master.dtype:
            before = self._before.setdefault(key, master.clone())
            same = weight.to(before.device) == before.to(weight.dtype)
            weight = torch.where(same, before, weight.to(before))
        master.copy_(weight)

    def take_top(self, key: Hashable, weight: Tensor, rest: Tensor) -> None:
        """Take a weight that is the top half of its master's bits; `rest` is the other half.

        What was written keeps these lower bits, which are less than one unit of its last place; a
        zero is a zero.
        """
        before = self._before.setdefault(key, rest.clone())
        rest.copy_(torch.where(weight == 0, torch.zeros_like(before), before))

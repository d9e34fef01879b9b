"""Averages of the weights that an engine trains, beside the optimizer's state in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ...checkpoint.optimizer_entries import AVERAGE

__all__ = ["Averages"]


class Averages:
    """Averages by FQN, in at least float32, sharded as the weights are. `own_part(tensor)` returns
    this rank's shard of a tensor."""

    def __init__(self, own_part: Callable[[Tensor], Tensor] = Tensor.detach) -> None:
        self.of: dict[str, Tensor] = {}
        self._own_part = own_part

    @torch.no_grad()
    def move(self, weights: Mapping[str, Tensor], weight: float) -> None:
        """Move each average to its weight by the fraction `weight`; a new one is a copy."""
        known = [name for name in weights if name in self.of]
        if known:
            ends = [self._own_part(weights[name]) for name in known]
            averages = [self._own_part(self.of[name]) for name in known]
            wide = [end.to(old.dtype) for end, old in zip(ends, averages, strict=True)]
            torch._foreach_lerp_(averages, wide, weight)
        for name, tensor in weights.items():  # in one order on all ranks, which partition them
            if name not in self.of:
                self.of[name] = widened(tensor)

    @contextmanager
    def shown_in(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """While it is open these weights are the averages; it takes the memory of a copy."""
        shown = {name: self._own_part(weights[name]) for name in self.of}
        kept = {name: tensor.clone() for name, tensor in shown.items()}
        with torch.no_grad():
            for name, tensor in shown.items():
                tensor.copy_(self._own_part(self.of[name]))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in shown.items():
                    tensor.copy_(kept[name])

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages under the names that a checkpoint stores them by."""
        return {f"{name}/{AVERAGE}": tensor for name, tensor in self.of.items()}


def widened(weight: Tensor) -> Tensor:
    """A copy in at least float32, in which a small move is not lost."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.detach().to(wide, copy=True)

"""Optimizers that keep what a checkpoint does not hold."""

from __future__ import annotations

from typing import Any

from ...checkpoint.optimizer_entries import unsaved
from .layerwise import LayerWiseDummyOptimizer

__all__ = ["unsaved_state"]


def unsaved_state(optimizer: Any) -> list[str]:
    """What of an optimizer's state, by name, is in no checkpoint: objects that are neither tensor
    nor number (GaLore's projectors), and all that optimizers inside backward keep to themselves.
    """
    if isinstance(optimizer, LayerWiseDummyOptimizer):
        states = [s for each in optimizer.optimizer_dict.values() for s in each.state.values()]
        return sorted({key for state in states for key in state})
    own = unsaved(optimizer)
    return sorted(
        {*own, *(name for name in vars(optimizer) if name.startswith("exp_avg"))}
    )  # AdaLomo

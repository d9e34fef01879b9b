"""An optimizer that counts in its groups must be called once a step."""

from __future__ import annotations

import torch

from ...checkpoint.optimizer_entries import copied, same, settings_of
from ...kernel.errors import RecipeError

__all__ = ["first_step"]


def first_step(optimizer: torch.optim.Optimizer, how: str) -> None:
    """Make the first call of an optimizer that is called several times a step. A count that it
    keeps in its groups would increase with each call: raises `RecipeError` that names such counts.
    `how`: the value of `backend.optimizer_step`."""
    groups = list(optimizer.param_groups)
    before = [copied(settings_of(group)) for group in groups]
    optimizer.step()
    counted = {
        key
        for group, then in zip(groups, before, strict=True)
        for key, value in settings_of(group).items()
        if key not in then or not same(value, then[key])
    }
    if counted:
        raise RecipeError(
            f"the optimizer {type(optimizer).__name__} changes {', '.join(sorted(counted))} in its "
            f"parameter groups, and backend.optimizer_step={how} calls it several times a step: "
            "leave that at auto, or set whole"
        )

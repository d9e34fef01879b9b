"""Optimizer groups without parameters, which DeepSpeed leaves out and other drivers keep.

HF's Trainer makes two groups; one is empty if only adapters are trained. Lists with one entry per
group are converted from either count to the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["aligned", "aligned_schedule", "schedule_with_asked"]

Order = Sequence[Sequence[str | None]]
"""The names of the parameters in each group, empty ones among them."""

_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "_init_lrs")
"""Entries of a schedule's state that hold one item per group."""


def aligned(values: Any, order: Order, count: int) -> Any:
    """Convert `values` to `count` groups: drop the values of empty groups, or insert the first
    value for them, which no parameter uses. Other counts are returned unchanged.
    """
    held = [bool(names) for names in order]
    if not isinstance(values, list | tuple) or len(values) == count or sum(held) == len(held):
        return values
    if (len(values), count) == (len(held), sum(held)):
        return [value for value, is_held in zip(values, held, strict=True) if is_held]
    if (len(values), count) == (sum(held), len(held)) and values:
        left = iter(values)
        return [next(left) if is_held else values[0] for is_held in held]
    return values


def aligned_schedule(state: Any, order: Order, count: int) -> Any:
    """Return the state of a schedule, with its lists of one item per group converted in the same
    way."""
    if not isinstance(state, Mapping):
        return state
    changed = {name: aligned(state[name], order, count) for name in _BY_GROUP if name in state}
    return {**state, **changed}


def schedule_with_asked(
    then: Mapping[str, Any], now: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the state of a checkpoint's schedule with the rates that this run asks for. `now`: the
    state of this run's schedule; `groups`: the hyper-parameters to resume with."""
    last = [group.get("lr") for group in groups]
    rates = {"base_lrs": now.get("base_lrs"), "_last_lr": last}
    return {**then, **{name: rate for name, rate in rates.items() if name in then and rate}}

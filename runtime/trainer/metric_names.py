"""The names of metrics in settings and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

__all__ = ["metrics_by_name"]

T = TypeVar("T")


def metrics_by_name(metrics: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """Return the metrics of data sets, in the order of `eval_data`, as `<set>.<metric>`; those of
    the first set also by their bare names. Where two have one name, a name with the set wins."""
    named: dict[str, T] = {}
    for data, found in reversed([*metrics.items()]):
        named |= {f"{data}.{key}": value for key, value in found.items()}
    return {**next(iter(metrics.values()), {}), **named}

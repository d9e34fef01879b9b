"""Statistics of parameters by layer and step, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .record_file import Record

__all__ = ["LayerMap", "LayerMaps"]

_MAX_ROWS, _MAX_COLUMNS = 48, 60
_GRADIENT, _RATIO = "Gradient norm (before clipping)", "Update norm divided by weight norm"


@dataclass(frozen=True)
class LayerMap:
    """One quantity by layer and step."""

    title: str
    layers: Sequence[str]
    steps: Sequence[int]
    values: Sequence[Sequence[float | None]]
    """By layer, and by step; None: unknown. Infinity stands for all that is not finite."""


_Column = tuple[int, Mapping[str, Mapping[str, float | None]]]
"""A step, and by title the value of each layer."""


class LayerMaps:
    """Maps of the statistics of a run. Of many steps, some at equal distances are kept. Of many
    parameters, those of one layer are one row.
    """

    def __init__(self) -> None:
        self._columns: list[_Column] = []
        self._num_added, self._every = 0, 1

    def add(self, records: Sequence[Record]) -> None:
        """Add records of statistics."""
        for record in records:
            self._num_added += 1
            if self._num_added % self._every == 0:
                self._columns.append((record["step"], _by_layer(record["parameters"])))
            if len(self._columns) == 2 * _MAX_COLUMNS:
                self._columns, self._every = self._columns[1::2], 2 * self._every

    def go_back(self, step: int) -> None:
        """Forget what came after that step."""
        self._columns = [column for column in self._columns if column[0] <= step]

    def maps(self) -> list[LayerMap]:
        """Return a map of gradient norms and a map of relative updates; none without records."""
        step = -(-len(self._columns) // _MAX_COLUMNS) or 1
        columns = self._columns[::-step][::-1]  # with the newest
        steps = [at for at, _ in columns]
        found = []
        for title in (_GRADIENT, _RATIO):
            values = [by_title[title] for _, by_title in columns]
            if layers := list(dict.fromkeys(name for each in values for name in each))[:_MAX_ROWS]:
                rows = [[each.get(name) for each in values] for name in layers]
                found.append(LayerMap(title, layers, steps, rows))
        return found


_Figures = Mapping[str, Mapping[str, float | None]]


def _by_layer(parameters: _Figures) -> _Figures:
    """Return both quantities of each layer: of its parameters together."""
    gradients: dict[str, float] = {}
    weights: dict[str, float] = {}
    updates: dict[str, float] = {}
    for name, layer in zip(parameters, _layers([*parameters]), strict=True):
        figures = parameters[name]
        if layer not in weights and len(weights) == _MAX_ROWS:
            continue
        if figures.get("grad_nonfinite") is not None:
            _add_square(gradients, layer, figures.get("grad_norm"))
        _add_square(weights, layer, figures.get("weight_norm"))
        _add_square(updates, layer, figures.get("update_norm"))
    ratios = {
        layer: math.sqrt(updates[layer] / square) if 0 < square < math.inf else None
        for layer, square in weights.items()
    }
    norms = {layer: math.sqrt(square) for layer, square in gradients.items()}
    return {_GRADIENT: {layer: norms.get(layer) for layer in weights}, _RATIO: ratios}


def _add_square(sums: dict[str, float], layer: str, norm: float | None) -> None:
    """Add the square of a norm; None stands for one that is not finite."""
    sums[layer] = sums.get(layer, 0.0) + (math.inf if norm is None else norm * norm)


def _layers(names: Sequence[str]) -> list[str]:
    """Return the row of each parameter: its name, or its name's beginning if there are too many."""
    split = [name.split(".") for name in names]
    most = max(map(len, split), default=1)
    for depth in range(most, 1, -1):
        layers = [".".join(parts[:depth]) for parts in split]
        if len(set(layers)) <= _MAX_ROWS:
            return layers
    return [parts[0] for parts in split]

"""A few samples in place of all data: if a model cannot learn them by heart, there is a mistake."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import Subset

from ..kernel.errors import SettingError
from ..kernel.recipe import Recipe
from .indexed import is_indexed, length_of
from .mixture import Mix
from .prebatched import Batches
from .stream import ReadAgain

__all__ = ["on_first_samples"]


class _FirstSamples(ReadAgain):
    """The first samples of each epoch of a stream."""

    def __init__(self, stream: Any, num_samples: int) -> None:
        super().__init__(stream)
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        opened = self.stream() if callable(self.stream) else self.stream
        return islice(iter(opened), self.num_samples)


def on_first_samples(recipe: Recipe, num_samples: int | None) -> Recipe:
    """Return the recipe with the first `num_samples` samples of `train_data`, to train on and for
    each evaluation; None returns the recipe unchanged. Raises `SettingError` for data without first
    samples."""
    if num_samples is None:
        return recipe
    data = recipe.train_data
    if isinstance(data, (Batches, Mix)):
        remedy = "your loader makes the batches" if isinstance(data, Batches) else "it is drawn"
        raise SettingError(
            f"data.overfit is {num_samples}, and train_data is {type(data).__name__}: {remedy}, so "
            "that there are no first samples. Give a data set of a few samples instead"
        )
    if is_indexed(data):
        first: Any = Subset(data, range(min(num_samples, length_of(data) or 0)))
    else:
        first = _FirstSamples(data, num_samples)
    lengths = None if recipe.lengths is None else recipe.lengths[:num_samples]
    names = [*recipe.eval_data] or ["overfit"]
    return dataclasses.replace(
        recipe, train_data=first, lengths=lengths, eval_data=dict.fromkeys(names, first)
    )

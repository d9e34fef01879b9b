"""The first microbatch of a run."""

from __future__ import annotations

import math
from contextlib import closing

from ..data.open_dataset import by_sample
from ..data.prebatched import Batches
from ..kernel.batches import Position
from ..kernel.recipe import Batch, Recipe
from ..trainer.settings import Settings

__all__ = ["first_batch"]


def first_batch(recipe: Recipe, settings: Settings, num_readers: int) -> Batch:
    """Return the first microbatch of training data of one of so many readers."""
    if isinstance(recipe.train_data, Batches):
        return next(iter(recipe.train_data.loader))
    part = math.ceil(settings.global_batch / num_readers)
    loader = by_sample(
        recipe.train_data,
        global_batch=max(settings.global_batch, num_readers),
        micro_batch=min(settings.micro_batch or part, part),
        collate=recipe.collate,
        num_readers=num_readers,
    )
    with closing(loader.groups(Position(), 1)) as groups:
        return next(next(groups).microbatches).batch

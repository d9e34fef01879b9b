"""predict: a trained model's outputs for data, on any driver."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from ..kernel.paths import Url
from ..kernel.recipe import Batch, Recipe
from .inference import prepared
from .predictions import Chunk, gather_predictions
from .recipe_checks import report_exits
from .settings import Settings

__all__ = ["predict"]


def predict(
    recipe: Recipe,
    data: Any,
    checkpoint: str | os.PathLike[str] | Url | None = None,
    *,
    forward: Callable[[nn.Module, Batch], Any] | None = None,
    settings: Settings | None = None,
    backend: str = "auto",
    backend_options: Mapping[str, Any] | None = None,
    padding: float = -100,
    ranks: Collection[int] | None = None,
    receive: Callable[[Chunk], None] | None = None,
) -> Any:
    """Return the outputs of the recipe's model for every sample of `data`, in order; called by
    every rank. No optimizer is built; of the recipe only `model` and `collate` are used.

    `checkpoint`: the weights (a checkpoint, a folder of them, a run folder, a URL); None: the
    recipe's own. `forward(module, batch)`: by default `module(batch)`; it returns a tensor, or
    mappings, lists and tuples of tensors, each with the samples as its first dimension; where sizes
    of the second differ, shorter rows are filled up with `padding`. `settings.evaluate.micro_batch`
    samples, or `micro_batch`, or `global_batch`, are a batch of one feeder. `ranks`: the ranks that
    get the outputs, by default all. With `receive`, these get each `Chunk` in order and nothing is
    kept, so that memory does not grow; without it they get everything as one structure. Other ranks
    get None.

    Raises `UsageError` (for a checkpoint that does not exist or is of another model, among others),
    `DataFailed` and `RecipeFailed`.
    """
    with report_exits(), prepared(recipe, settings, backend, backend_options) as inference:
        if checkpoint is not None:
            inference.load(checkpoint)
        return gather_predictions(
            inference.session,
            inference.engine,
            forward or _call,
            inference.groups(data),
            padding=padding,
            ranks=ranks,
            receive=receive,
        )


def _call(module: nn.Module, batch: Batch) -> Any:
    return module(batch)

"""predict: a trained model's outputs for data, on any driver."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..checkpoint import WithoutOptimizer
from ..data.open_dataset import once, open_dataset
from ..kernel.paths import Url
from ..kernel.recipe import Batch, Recipe
from ..kernel.registry import refuse_unpromised, usable_driver
from .predictions import Chunk, gather_predictions
from .recipe_checks import exits_told
from .resume import find_checkpoint
from .setting_values import override
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
    """Returns the outputs of the recipe's model for every sample of `data`, in their order;
    called by every rank. No optimizer is built; of the recipe only `model` and `collate` are
    used.

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
    driver, settings = usable_driver(backend), settings or Settings()
    plan = settings.plan(override(driver.options_type(), backend_options or {}, "backend."))
    refuse_unpromised(driver, plan)
    size = settings.evaluate.micro_batch or settings.micro_batch or settings.global_batch
    with exits_told(), driver.open(plan) as session:
        engine = session.prepare(dataclasses.replace(recipe, optimizer=_nothing_to_keep))
        if checkpoint is not None:
            found = find_checkpoint(session, checkpoint, None, verify=settings.checkpoint.verify)
            assert found is not None, "only 'auto' finds none"
            engine.restore(WithoutOptimizer(found))
        source = open_dataset(
            data,
            session,
            seed=settings.seed,
            global_batch=size * session.world.num_feeders,
            micro_batch=size,
            num_epochs=1,
            collate=recipe.collate,
            workers=settings.data.workers,
            fixed_size=driver.capabilities(plan).static_shapes,
        )
        return gather_predictions(
            session,
            engine,
            forward or _call,
            once(source),
            padding=padding,
            ranks=ranks,
            receive=receive,
        )


def _call(module: nn.Module, batch: Batch) -> Any:
    return module(batch)


def _nothing_to_keep(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """A driver wraps an optimizer with the model; this one is never asked for a step."""
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.0)

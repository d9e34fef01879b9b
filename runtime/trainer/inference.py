"""A model for evaluation or prediction on any driver: no optimizer, no training."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..checkpoint import CheckpointReader, WithoutOptimizer
from ..checkpoint.averages import averaged_reader, has_averages
from ..data.fork_gc import stay_forkable
from ..data.open_dataset import once, open_dataset
from ..kernel.batches import Group
from ..kernel.contract import Engine, Session
from ..kernel.paths import Place, Url
from ..kernel.recipe import Recipe
from ..registry import refuse_unpromised, usable_driver
from .late_ranks import propagate_errors
from .own_gradients import evaluate as measure
from .recipe_checks import report_exits
from .resume import find_checkpoint
from .setting_values import override
from .settings import Settings

__all__ = ["Inference", "evaluate", "prepared"]


@dataclass(frozen=True)
class Inference:
    """The model of a recipe in a session. Every method is called by all ranks."""

    recipe: Recipe
    settings: Settings
    session: Session
    engine: Engine
    fixed_size: bool
    """Batches must have one size (`Capabilities.static_shapes`)."""

    def load(self, checkpoint: str | os.PathLike[str] | Url) -> None:
        """Take the weights of a checkpoint, or of the newest in a folder, or their averages, as
        `settings.evaluate.weights` says. Raises `CheckpointError`."""
        verify = self.settings.checkpoint.verify
        found = find_checkpoint(self.session, checkpoint, None, verify=verify)
        assert found is not None, "only 'auto' finds none"
        self.engine.restore(self._reader(found))

    def _reader(self, found: Place) -> CheckpointReader:
        reader = WithoutOptimizer(found)
        if self.settings.evaluate.weights == "present":
            return reader
        not_begun = reader.manifest.settings.get("average.decay") is not None
        if not_begun and not has_averages(CheckpointReader(found)):
            return reader  # an evaluation in that run had its weights, too
        return averaged_reader(found)

    def groups(self, data: Any) -> Generator[Group, None, None]:
        """Yield `data` once, in order, in batches of `settings.evaluate.micro_batch`, else
        `micro_batch`, else `global_batch` samples on one feeder."""
        settings = self.settings
        size = settings.evaluate.micro_batch or settings.micro_batch or settings.global_batch
        source = open_dataset(
            data,
            self.session,
            seed=settings.seed,
            global_batch=size * self.session.world.num_readers,
            micro_batch=size,
            num_epochs=1,
            collate=self.recipe.collate,
            workers=settings.data.workers,
            fixed_size=self.fixed_size,
        )
        return once(source)

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each of the recipe's evaluation data sets."""
        return {
            name: measure(self.session, self.engine, self.recipe, self.groups(data))
            for name, data in self.recipe.eval_data.items()
        }


@contextmanager
def prepared(
    recipe: Recipe,
    settings: Settings | None = None,
    backend: str = "auto",
    backend_options: Mapping[str, Any] | None = None,
) -> Iterator[Inference]:
    """Open a driver and yield the recipe's model on it, with its initial weights. Raises
    `UsageError`."""
    driver, settings = usable_driver(backend), settings or Settings()
    plan = settings.plan(override(driver.options_type(), backend_options or {}, "backend."))
    refuse_unpromised(driver, plan)
    able = driver.capabilities(plan)
    with driver.open(plan) as session, propagate_errors(session, able):
        stay_forkable()
        engine = session.prepare(dataclasses.replace(recipe, optimizer=_nothing_to_keep))
        yield Inference(recipe, settings, session, engine, able.static_shapes)


def evaluate(
    recipe: Recipe,
    checkpoint: str | os.PathLike[str] | Url | None = None,
    *,
    settings: Settings | None = None,
    backend: str = "auto",
    backend_options: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, float]]:
    """Return the metrics of each of the recipe's `eval_data`, by name, as an evaluation in training
    does. Called by every rank. No optimizer is built.

    `checkpoint`: the source of the weights (a checkpoint, a folder of checkpoints, a run folder, a
    URL); None: the recipe's initial weights. Raises `UsageError` (such as for a checkpoint that
    does not exist or is of another model), `DataFailed` and `RecipeFailed`.
    """
    with report_exits(), prepared(recipe, settings, backend, backend_options) as inference:
        if checkpoint is not None:
            inference.load(checkpoint)
        return inference.evaluate()


def _nothing_to_keep(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return a placeholder optimizer: a driver wraps one with the model, but its step is never
    called."""
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.0)

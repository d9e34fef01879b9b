"""Searches before a run: for a learning rate, and for the largest microbatch that fits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ..data.indexed import length_of
from ..data.prebatched import Batches
from ..kernel import events
from ..kernel.errors import NonFiniteTraining, OutOfMemory, RecipeError, SettingError, ran_out
from ..kernel.recipe import Recipe
from .fit import fit
from .optimizers import OptimizerSettings
from .settings import (
    AverageSettings,
    CheckpointSettings,
    EvaluateSettings,
    ScheduleSettings,
    Settings,
    SpikeSettings,
    StopSettings,
)

__all__ = ["LearningRate", "MicroBatch", "find_learning_rate", "find_micro_batch"]

_SMOOTHING = 0.9
"""Share of the running mean of losses that stays with each step."""
_FIRST = 10
"""The first steps, whose losses are not judged: the mean of a few losses is too noisy."""
_DIVERGED = 4.0
"""The search ends when the loss exceeds the least loss so far by this factor."""


@dataclass(frozen=True)
class LearningRate:
    """The result of `find_learning_rate`."""

    rates: Sequence[float]
    losses: Sequence[float]
    """Running mean of the loss at each rate."""
    suggestion: float | None
    """A tenth of the rate at which the loss was least; None if the loss did not fall."""


def find_learning_rate(
    recipe: Recipe,
    settings: Settings | None = None,
    *,
    backend: str = "auto",
    low: float = 1e-7,
    high: float = 10.0,
    steps: int = 100,
) -> LearningRate:
    """Train once, while the learning rate rises from `low` to `high`, each step by the same factor
    (Smith, https://arxiv.org/abs/1506.01186, section 3.3); nothing is kept. The optimizer and the
    batch are those of the settings, and each group keeps its share of the rate.

    Raises `RecipeError` for a recipe with an optimizer or a schedule of its own.
    """
    settings = settings or Settings()
    if not 0 < low < high or steps < 2 * _FIRST:
        raise SettingError(
            f"low is {low}, high {high} and steps {steps}; they must be 0 < low < high, and at "
            f"least {2 * _FIRST} steps"
        )
    for name in ("optimizer", "schedule"):
        if getattr(recipe, name) is not None:
            raise RecipeError(
                f"the recipe has {'an' if name == 'optimizer' else 'a'} {name} of its own, whose "
                f"learning rate is not known; leave it out, and use the settings {name}.*"
            )
    risen = replace(recipe, schedule=lambda applied: (high / low) ** (applied / (steps - 1)))
    watch = _Losses()
    trial = replace(
        _short(settings, steps), optimizer=_scaled(settings, low), max_nonfinite=1, log_every=1
    )
    with suppress(NonFiniteTraining):  # it has diverged, which ends a search
        fit(risen, trial, backend=backend, observers=[watch])
    return LearningRate(watch.rates, watch.losses, _suggested(watch))


def _scaled(settings: Settings, rate: float) -> OptimizerSettings:
    """Return the optimizer's settings with another rate; rates of groups are scaled in
    proportion."""
    own = settings.optimizer
    share = rate / own.lr if own.lr else 1.0
    groups = tuple(
        group if group.lr is None else replace(group, lr=group.lr * share) for group in own.groups
    )
    return replace(own, lr=rate, groups=groups)


class _Losses:
    """An observer that keeps the running mean of the losses, and ends the run when it grows."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.first: list[float] = []
        """The first losses as they were."""
        self._mean = 0.0

    def __call__(self, event: events.Event) -> events.Request | None:
        if not isinstance(event, events.Logged) or not math.isfinite(event.loss):
            return None
        self._mean = _SMOOTHING * self._mean + (1 - _SMOOTHING) * event.loss
        number = len(self.losses) + 1
        self.first += [event.loss] if number <= _FIRST else []
        self.rates.append(event.learning_rate)
        self.losses.append(self._mean / (1 - _SMOOTHING**number))
        grown = self.losses[-1] > _DIVERGED * abs(min(self.losses))
        return events.Request.STOP if grown and number >= _FIRST else None


def _suggested(watch: _Losses) -> float | None:
    """Return a tenth of the rate with the least loss. Return None if no loss is clearly below the
    first losses, by the spread of the first losses, which is four times the spread of their running
    mean."""
    first, losses = watch.first, watch.losses
    if len(losses) <= _FIRST:
        return None
    least = min(range(_FIRST, len(losses)), key=lambda n: losses[n])
    fell = losses[least] < statistics.mean(first) - statistics.stdev(first)
    return watch.rates[least] / 10 if fell else None


@dataclass(frozen=True)
class MicroBatch:
    """One size that `find_micro_batch` tried."""

    size: int
    samples_per_second: float | None
    """None if memory ran out."""


def find_micro_batch(
    recipe: Recipe,
    settings: Settings | None = None,
    *,
    backend: str = "auto",
    most: int = 4096,
) -> Iterator[MicroBatch]:
    """Try microbatches of 1, 2, 4 and so on samples, up to `most` or the number of samples, with
    three steps each. Yield the result of each size. The last size ran out of memory or is the
    largest.

    Raises `SettingError` for ready batches, whose size is their loader's.
    """
    if isinstance(recipe.train_data, Batches):
        raise SettingError(
            "the training data are Batches, whose size is their loader's: hand over the data set "
            "itself, or try batch sizes of the loader one by one"
        )
    settings = settings or Settings()
    samples = length_of(recipe.train_data)
    size, largest = 1, most if samples is None else min(most, samples)
    while size <= largest:
        found = _tried(recipe, settings, backend, size)
        yield found
        if found.samples_per_second is None:
            return
        size *= 2


def _tried(recipe: Recipe, settings: Settings, backend: str, size: int) -> MicroBatch:
    speeds: list[float] = []

    def watch(event: events.Event) -> None:
        if isinstance(event, events.Logged):
            speeds.append(event.samples_per_second)

    trial = replace(
        _short(settings, 3), global_batch=size, micro_batch=size, out_of_memory="stop", log_every=1
    )
    try:
        fit(recipe, trial, backend=backend, observers=[watch])
    except Exception as error:
        if not isinstance(error, OutOfMemory) and not ran_out(error):
            raise
        return MicroBatch(size, None)
    return MicroBatch(size, max(speeds[1:]))


def _short(settings: Settings, steps: int) -> Settings:
    """Return the settings of a trial, which is not evaluated and saves nothing."""
    return replace(
        settings,
        steps=steps,
        evaluate=EvaluateSettings(at_end=False, sanity_check=False),
        checkpoint=CheckpointSettings(at_end=False),
        stop=StopSettings(),
        schedule=ScheduleSettings(),
        average=AverageSettings(),
        spikes=SpikeSettings(),
    )

"""The learning rate schedules, by name, as factors of the first rate.

A schedule is a function from the number of updates done to a factor. `get_scheduler` makes a torch
scheduler of it, whose state is plain JSON. Two look at a metric instead of the clock:
`reduce_lr_on_plateau` (torch's) and `greedy`.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ...trainer.schedule import cosine
from .layerwise import LayerWiseDummyOptimizer, LayerWiseDummyScheduler
from .plateau import GreedyLR, Plateau

__all__ = ["get_scheduler"]

_log = logging.getLogger(__name__)

Factor = Callable[[int], float]


@dataclass(frozen=True)
class Span:
    """The range of a schedule: updates of warm-up, all updates, and the first rate."""

    num_warmup_steps: int
    num_training_steps: int
    lr: float

    def rise(self, step: int) -> float:
        """The share of the warm-up that is done, below 1 inside it."""
        return step / max(1, self.num_warmup_steps)

    def progress(self, step: int) -> float:
        """The share of the updates after the warm-up that is done; 1 at the last one."""
        after = self.num_training_steps - self.num_warmup_steps
        return (step - self.num_warmup_steps) / max(1, after)

    def floor(self, min_lr: float | None, min_lr_rate: float | None) -> float:
        """The smallest factor, given as a rate or as a factor. ValueError unless it is one."""
        if (min_lr is None) == (min_lr_rate is None):
            given = "both are" if min_lr is not None else "neither is"
            raise ValueError(
                f"give either min_lr or min_lr_rate in lr_scheduler_kwargs: {given} given"
            )
        return min_lr_rate if min_lr is None else min_lr / self.lr  # type: ignore[return-value]


def _warmed(span: Span, after: Factor) -> Factor:
    """A straight line from 0 to 1 over the warm-up, then `after`."""
    return lambda step: span.rise(step) if step < span.num_warmup_steps else after(step)


def _wave(progress: float, num_cycles: float, floor: float = 0.0) -> float:
    """A cosine between 1 and `floor`."""
    return max(0.0, cosine(progress, floor, num_cycles))


def _constant(span: Span) -> Factor:
    return lambda step: 1.0


def _constant_with_warmup(span: Span) -> Factor:
    return _warmed(span, lambda step: 1.0)


def _linear(span: Span) -> Factor:
    last, length = span.num_training_steps, span.num_training_steps - span.num_warmup_steps
    return _warmed(span, lambda step: max(0.0, (last - step) / max(1, length)))


def _cosine(span: Span, num_cycles: float = 0.5) -> Factor:
    return _warmed(span, lambda step: _wave(span.progress(step), num_cycles))


def _cosine_with_restarts(span: Span, num_cycles: int = 1) -> Factor:
    def after(step: int) -> float:
        progress = span.progress(step)
        if progress >= 1.0:
            return 0.0
        return cosine((num_cycles * progress) % 1.0)

    return _warmed(span, after)


def _cosine_with_min_lr(
    span: Span,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> Factor:
    floor = span.floor(min_lr, min_lr_rate)
    return _warmed(span, lambda step: _wave(span.progress(step), num_cycles, floor))


def _cosine_warmup_with_min_lr(
    span: Span,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> Factor:
    """As the one above, but no update has a rate of 0: both phases are one update ahead."""
    floor, warmup = span.floor(min_lr, min_lr_rate), span.num_warmup_steps

    def factor(step: int) -> float:
        if step >= warmup:
            left = max(1.0, span.num_training_steps - warmup)
            return _wave((step - warmup + 1) / left, num_cycles, floor)
        if warmup_lr_rate is None:
            return (step + 1) / max(1, warmup)
        return warmup_lr_rate + (1.0 - warmup_lr_rate) * step / max(1, warmup - 1)

    return factor


def _polynomial(span: Span, lr_end: float = 1e-7, power: float = 1.0) -> Factor:
    if lr_end >= span.lr:
        raise ValueError(
            f"lr_end is {lr_end}, which a rate that begins at {span.lr} cannot fall to; make it"
            " smaller, in lr_scheduler_kwargs"
        )

    def after(step: int) -> float:
        if step > span.num_training_steps:
            return lr_end / span.lr
        length = span.num_training_steps - span.num_warmup_steps
        left = 1 - (step - span.num_warmup_steps) / length
        return float((span.lr - lr_end) * left**power + lr_end) / span.lr

    return _warmed(span, after)


def _inverse_sqrt(span: Span, timescale: int | None = None) -> Factor:
    scale = timescale if timescale is not None else span.num_warmup_steps or 10_000
    shift = scale - span.num_warmup_steps
    return _warmed(span, lambda step: 1.0 / math.sqrt((step + shift) / scale))


_RISES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: done,
    "cosine": lambda done: 0.5 * (1.0 - math.cos(math.pi * done)),
    "1-sqrt": lambda done: 1.0 - math.sqrt(1.0 - done),
}
_FALLS: dict[str, Callable[[float, float], float]] = {
    "linear": lambda done, cycles: 1.0 - done,
    "cosine": lambda done, cycles: cosine(done, cycles=cycles),
    "1-sqrt": lambda done, cycles: 1.0 - math.sqrt(done),
}


def _warmup_stable_decay(
    span: Span,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> Factor:
    for name, value in (("warmup_type", warmup_type), ("decay_type", decay_type)):
        if value not in _RISES:
            raise ValueError(f"{name} is {value!r}; known are {', '.join(_RISES)}")
    warmup = span.num_warmup_steps
    if num_stable_steps is None:
        num_stable_steps = span.num_training_steps - warmup - num_decay_steps
    decay = warmup + num_stable_steps

    def lifted(height: float) -> float:
        return max(0.0, height * (1.0 - min_lr_ratio) + min_lr_ratio)

    def factor(step: int) -> float:
        if step < warmup:
            return lifted(_RISES[warmup_type](span.rise(step)))
        if step < decay:
            return 1.0
        if step < decay + num_decay_steps:
            done = (step - decay) / max(1, num_decay_steps)
            return lifted(_FALLS[decay_type](done, num_cycles))
        return min_lr_ratio

    return factor


_BY_CLOCK: dict[str, Callable[..., Factor]] = {
    "constant": _constant,
    "constant_with_warmup": _constant_with_warmup,
    "cosine": _cosine,
    "cosine_warmup_with_min_lr": _cosine_warmup_with_min_lr,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_with_restarts": _cosine_with_restarts,
    "inverse_sqrt": _inverse_sqrt,
    "linear": _linear,
    "polynomial": _polynomial,
    "warmup_stable_decay": _warmup_stable_decay,
}
_BY_METRIC: dict[str, Callable[..., LRScheduler]] = {
    "greedy": GreedyLR,
    "reduce_lr_on_plateau": Plateau,
}
_WITHOUT_LENGTH = ("constant", "constant_with_warmup", "inverse_sqrt")
_WITHOUT_OPTIONS = ("constant", "constant_with_warmup")


def get_scheduler(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: Mapping[str, Any] | None = None,
) -> LRScheduler:
    """The scheduler of that name for an optimizer; steps are updates of the weights.

    `scheduler_specific_kwargs`: what `lr_scheduler_kwargs` holds; the constant schedules take
    none, and say so. Raises ValueError for an unknown name, a missing number of steps, or values
    that do not fit; TypeError for a keyword that the schedule does not have.
    """
    name = str(getattr(name, "value", name))
    if name not in _BY_CLOCK and name not in _BY_METRIC:
        known = ", ".join(sorted([*_BY_CLOCK, *_BY_METRIC]))
        raise ValueError(f"lr_scheduler_type {name!r} is not known; known are {known}")
    options = dict(scheduler_specific_kwargs or {})
    if name in _WITHOUT_OPTIONS and options:
        _log.warning("lr_scheduler_kwargs %s have no effect on the schedule %r", options, name)
        options = {}
    if isinstance(optimizer, LayerWiseDummyOptimizer):
        return LayerWiseDummyScheduler(
            optimizer,
            lambda inner: get_scheduler(name, inner, num_warmup_steps, num_training_steps, options),
        )
    if name in _BY_METRIC:
        _check_options(name, _BY_METRIC[name], options)
        return _BY_METRIC[name](optimizer, **options)
    last_epoch = options.pop("last_epoch", -1)
    span = _span(name, optimizer, num_warmup_steps, num_training_steps, options)
    _check_options(name, _BY_CLOCK[name], options)
    return LambdaLR(optimizer, _BY_CLOCK[name](span, **options), last_epoch)


def _span(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: int | None,
    num_training_steps: int | None,
    options: Mapping[str, Any],
) -> Span:
    if num_warmup_steps is None and name != "constant":
        raise ValueError(f"the schedule {name!r} needs num_warmup_steps, which is None")
    has_length = name in _WITHOUT_LENGTH or options.get("num_stable_steps") is not None
    if num_training_steps is None and not has_length:
        raise ValueError(f"the schedule {name!r} needs num_training_steps, which is None")
    return Span(num_warmup_steps or 0, num_training_steps or 0, optimizer.defaults["lr"])


def _check_options(name: str, maker: Callable[..., Any], options: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(maker).parameters.values())[1:]  # the span or optimizer
    known = [parameter.name for parameter in parameters]
    required = [p.name for p in parameters if p.default is p.empty]
    wrong = [option for option in options if option not in known]
    missing = [option for option in required if option not in options]
    if wrong or missing:
        said = [f"does not take {', '.join(wrong)}"] if wrong else []
        said += [f"needs {', '.join(missing)}"] if missing else []
        raise TypeError(
            f"the schedule {name!r} {' and '.join(said)} in lr_scheduler_kwargs;"
            f" it takes {', '.join(known) or 'nothing'}"
        )

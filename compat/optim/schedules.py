"""The learning rate schedules by name.

The usual ones are here; the others, including those that follow a metric, are transformers' own.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from ..enums import SchedulerType
from ..errors import ArgumentError
from ..theirs import theirs
from .layerwise import LayerWiseDummyOptimizer, LayerWiseDummyScheduler

__all__ = ["follow_groups", "follows_a_metric", "get_scheduler"]

_log = logging.getLogger(__name__)


# --- factors of the first rate, by the number of updates done --------------------------------


def _constant(step: int) -> float:
    return 1.0


def _constant_with_warmup(step: int, *, num_warmup_steps: int) -> float:
    return min(1.0, step / max(1, num_warmup_steps)) if num_warmup_steps else 1.0


def _linear(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    if step < num_warmup_steps:
        return step / max(1, num_warmup_steps)
    return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))


def _cosine(
    step: int, *, num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5
) -> float:
    if step < num_warmup_steps:
        return step / max(1, num_warmup_steps)
    progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress)))


_OURS: dict[str, Callable[..., float]] = {
    "constant": _constant,
    "constant_with_warmup": _constant_with_warmup,
    "cosine": _cosine,
    "linear": _linear,
}
_WITHOUT_OPTIONS = ("constant", "constant_with_warmup")
_SPAN = ("num_warmup_steps", "num_training_steps")


class OneFactorLR(LambdaLR):
    """A `LambdaLR` with one factor for all groups, computed once per step. Checks that torch makes
    in the first steps, such as the order of calls, are skipped in later steps."""

    def step(self, epoch: int | None = None) -> None:
        groups = self.optimizer.param_groups
        if epoch is not None or self._step_count < 2 or not _are_floats(groups):
            super().step(epoch)
            return
        self._step_count += 1
        self.last_epoch += 1
        factor = self.lr_lambdas[0](self.last_epoch)
        self._last_lr = [base * factor for base in self.base_lrs]
        for group, rate in zip(groups, self._last_lr, strict=True):
            group["lr"] = rate


def _are_floats(groups: Sequence[Mapping[str, Any]]) -> bool:
    """False if a rate is a tensor, which must be written in place."""
    return all(type(group["lr"]) is float for group in groups)


def follows_a_metric(scheduler: Any) -> bool:
    """True if evaluations step the schedule, and not updates."""
    return hasattr(scheduler, "patience")


def follow_groups(scheduler: Any, groups: Sequence[dict[str, Any]]) -> None:
    """Add groups that were added to the optimizer to a schedule of factors (`LambdaLR`): their
    rates follow the common factor from now on. Other schedules are not changed. Raises
    `ArgumentError` if each group has its own factor.
    """
    if not isinstance(scheduler, LambdaLR) or len(scheduler.base_lrs) >= len(groups):
        return
    first, *others = scheduler.lr_lambdas
    if any(each is not first for each in others):
        raise ArgumentError(
            f"a group was added to the optimizer, which has {len(groups)} by now, and the schedule "
            f"{type(scheduler).__name__} has factors for {len(scheduler.base_lrs)}, one for each: "
            "nothing says which the new one follows. Give the Trainer a schedule of one factor, or "
            "an optimizer that has all groups from the start"
        )
    for group in groups[len(scheduler.base_lrs) :]:
        base = group.setdefault("initial_lr", group["lr"])
        scheduler.base_lrs.append(base)
        scheduler.lr_lambdas.append(first)
        group["lr"] = base * first(scheduler.last_epoch)


def get_scheduler(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: Mapping[str, Any] | None = None,
) -> LRScheduler:
    """Return the scheduler of a name for an optimizer; steps are updates of the weights.

    `scheduler_specific_kwargs`: the value of `lr_scheduler_kwargs`; the constant schedules accept
    none, and warn. Raises ValueError for an unknown name, a missing number of steps, or invalid
    values; TypeError for a keyword that the schedule does not have; ImportError if transformers is
    missing, which has all schedules except the linear, cosine and constant ones.
    """
    name = str(getattr(name, "value", name))
    if name not in [each.value for each in SchedulerType]:
        known = ", ".join(sorted(each.value for each in SchedulerType))
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
    maker = _OURS.get(name) or _their_maker(name)
    _check_options(name, maker, options)
    span = dict(zip(_SPAN, (num_warmup_steps, num_training_steps), strict=True))
    if name not in _OURS:
        get: Callable[..., LRScheduler] = theirs("optimization", "get_scheduler")
        return get(name, optimizer, **span, scheduler_specific_kwargs=options)
    last_epoch = options.pop("last_epoch", -1)
    needed = {key: span[key] for key in _SPAN if key in inspect.signature(maker).parameters}
    for key, value in needed.items():
        if value is None:
            raise ValueError(f"the schedule {name!r} needs {key}, which is None")
    return OneFactorLR(optimizer, partial(maker, **needed, **options), last_epoch)


def _their_maker(name: str) -> Callable[..., Any]:
    """Return the function of transformers that makes a schedule."""
    if name == SchedulerType.REDUCE_ON_PLATEAU:
        return ReduceLROnPlateau
    if name == SchedulerType.GREEDY:
        return theirs("optimization", "GreedyLR")  # type: ignore[no-any-return]
    kinds = theirs("optimization", "TYPE_TO_SCHEDULER_FUNCTION")
    return kinds[theirs("trainer_utils", "SchedulerType")(name)]  # type: ignore[no-any-return]


def _check_options(name: str, maker: Callable[..., Any], options: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(maker).parameters.values())[1:]  # the step or the optimizer
    parameters = [each for each in parameters if each.name not in _SPAN]
    known = [each.name for each in parameters]
    wrong = [option for option in options if option not in (*known, "last_epoch")]
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in options]
    if wrong or missing:
        said = [f"does not take {', '.join(wrong)}"] if wrong else []
        said += [f"needs {', '.join(missing)}"] if missing else []
        raise TypeError(
            f"the schedule {name!r} {' and '.join(said)} in lr_scheduler_kwargs;"
            f" it takes {', '.join(known) or 'nothing'}"
        )

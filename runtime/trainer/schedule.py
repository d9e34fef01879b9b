"""Learning-rate schedules: pure functions from the number of applied updates to a factor.

The learning rate of an update is its group's base rate times `factor(applied)`, where `applied`
counts the updates that really changed the weights before it, so that a skipped step does not move
the clock and resuming needs no scheduler state.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..kernel.errors import RecipeError, SettingError

__all__ = ["SCHEDULES", "RecipeSchedule", "Schedule", "build_schedule", "cosine"]

Schedule = Callable[[int], float]


class _Options(NamedTuple):
    """The parameters of a schedule's shape; see `build_schedule`."""

    final: float
    decay: float
    power: float
    cycles: int


def _constant(progress: float, options: _Options) -> float:
    return 1.0


def _linear(progress: float, options: _Options) -> float:
    return 1.0 - (1.0 - options.final) * progress


def _polynomial(progress: float, options: _Options) -> float:
    return options.final + (1.0 - options.final) * math.pow(1.0 - progress, options.power)


def _exponential(progress: float, options: _Options) -> float:
    return math.pow(options.final, progress)


def _with_restarts(progress: float, options: _Options) -> float:
    # Loshchilov and Hutter, https://arxiv.org/abs/1608.03983
    return (
        options.final if progress >= 1.0 else cosine(options.cycles * progress % 1.0, options.final)
    )


def cosine(progress: float, final: float = 0.0, cycles: float = 0.5) -> float:
    """Decay from 1 to `final` in half a cycle; Loshchilov and Hutter,
    https://arxiv.org/abs/1608.03983, without restarts."""
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress))


def _warmup_stable_decay(progress: float, options: _Options) -> float:
    # Hu et al., https://arxiv.org/abs/2404.06395
    final, decay = options.final, options.decay
    if progress <= 1.0 - decay:
        return 1.0
    return max(final, 1.0 - (1.0 - final) * (progress - (1.0 - decay)) / decay)


_SHAPES: dict[str, Callable[[float, _Options], float]] = {
    "constant": _constant,
    "cosine": lambda progress, options: cosine(progress, options.final),
    "cosine_with_restarts": _with_restarts,
    "exponential": _exponential,
    "linear": _linear,
    "one_cycle": lambda progress, options: cosine(progress, options.final),
    "plateau": _constant,
    "polynomial": _polynomial,
    "warmup_stable_decay": _warmup_stable_decay,
}

_IN_STEPS = {"step": "step_size", "multistep": "milestones"}
"""Schedules that fall by a factor at certain steps, and the setting that has the steps."""

_WITHOUT_END = ("constant", "inverse_sqrt", "plateau", *_IN_STEPS)

SCHEDULES: tuple[str, ...] = (*sorted((*_SHAPES, "inverse_sqrt", *_IN_STEPS)),)
"""The names that `build_schedule` knows."""


def build_schedule(
    name: str,
    *,
    total_steps: int | None,
    warmup: float = 0.0,
    final: float = 0.0,
    decay: float = 0.2,
    power: float = 1.0,
    cycles: int = 1,
    step_size: float | None = None,
    milestones: Sequence[float] = (),
    gamma: float = 0.1,
) -> Schedule:
    """Build a schedule over `total_steps` updates. None: the number is unknown, which only
    constant, inverse_sqrt and plateau allow, and step and multistep with whole steps.

    `warmup`: linear from near 0 to 1; a number of steps if at least 1, else a share of
    `total_steps`. `final`: the factor at the end, of all but constant, inverse_sqrt and plateau
    (whose falls `Plateau` adds). `decay`:
    the share of the steps after warmup in which warmup_stable_decay decays. `power`: of polynomial.
    `cycles`: of cosine_with_restarts. `one_cycle` rises by half a cosine, from 1/25, over `warmup`,
    and falls by half a cosine (Smith and Topin, https://arxiv.org/abs/1708.07120). `inverse_sqrt`
    falls with the square root of the step from the end of the warmup on (Vaswani et al.,
    https://arxiv.org/abs/1706.03762). `step` is multiplied by `gamma` each `step_size` steps after
    the warmup, and `multistep` at each of `milestones`, which count from the first step of the run,
    as torch.optim.lr_scheduler.StepLR and MultiStepLR do; below 1, these are shares of
    `total_steps`. Raises `SettingError`.
    """
    if name not in SCHEDULES:
        raise SettingError(f"schedule.name is {name!r}; it must be one of {', '.join(SCHEDULES)}")
    _check_steps(name, step_size, milestones, gamma)
    if warmup < 0:
        raise SettingError(f"schedule.warmup is {warmup}; it must be 0 or more")
    if not 0.0 < decay <= 1.0:
        raise SettingError(f"schedule.decay is {decay}; it must be above 0 and at most 1")
    if power <= 0 or cycles < 1:
        raise SettingError(
            f"schedule.power is {power} and schedule.cycles {cycles}; they must be above 0, and at "
            "least 1"
        )
    if name == "exponential" and not final > 0:
        raise SettingError("schedule.final is 0, which an exponential never reaches: set 0.01, say")
    if total_steps is None:
        lengths = (warmup, step_size or 0, *milestones)
        if name not in _WITHOUT_END or any(0 < length < 1 for length in lengths):
            raise SettingError(
                f"schedule.name is {name!r} with warmup {warmup}, which needs to know the number "
                "of steps, and the data has no length: set steps; or one of "
                f"{', '.join(_WITHOUT_END)} with whole steps in place of shares of them"
            )
        total_steps = 0
    warmup_steps = _in_steps(warmup, total_steps)
    if name == "one_cycle" and warmup_steps:
        return _one_cycle(warmup_steps, total_steps, final)
    rest = max(1, total_steps - warmup_steps)
    options = _Options(final, decay, power, cycles)
    timescale = max(1, warmup_steps)
    between = max(1, _in_steps(step_size or 0, total_steps))
    falls = sorted(_in_steps(at, total_steps) for at in milestones)

    def factor(applied: int) -> float:
        if applied < warmup_steps:
            return (applied + 1) / warmup_steps
        if name == "inverse_sqrt":
            return math.sqrt(timescale / max(timescale, applied + 1))
        if name == "step":
            return math.pow(gamma, (applied - warmup_steps) // between)
        if name == "multistep":
            return math.pow(gamma, bisect_right(falls, applied))
        return _SHAPES[name](min(1.0, (applied - warmup_steps) / rest), options)

    return factor


def _check_steps(
    name: str, step_size: float | None, milestones: Sequence[float], gamma: float
) -> None:
    """Raise `SettingError` where the steps of `step` or `multistep` are missing, set for another
    schedule, or not positive.
    """
    for schedule, setting, steps in (
        ("step", "step_size", () if step_size is None else (step_size,)),
        ("multistep", "milestones", tuple(milestones)),
    ):
        shown = f"schedule.{setting} is {', '.join(f'{at:g}' for at in steps) or 'not set'}"
        if name == schedule and not steps:
            raise SettingError(
                f"schedule.name is {name!r}, and {shown}: set the steps at which the learning rate "
                f"falls, such as {setting}=1000, or shares of them, such as {setting}=0.5"
            )
        if name != schedule and steps:
            raise SettingError(
                f"{shown}, which only schedule.name={schedule} uses, and schedule.name is {name!r}"
            )
        if not all(0 < at < math.inf for at in steps):
            raise SettingError(f"{shown}; it must be above 0, and finite")
    if not 0 <= gamma <= 1:
        raise SettingError(f"schedule.gamma is {gamma}; it must be from 0 to 1")


def _in_steps(length: float, total_steps: int) -> int:
    """Return a number of steps; below 1, it is a share of all."""
    return round(length) if length >= 1 else round(length * total_steps)


def _one_cycle(warmup_steps: int, total_steps: int, final: float) -> Schedule:
    """Count steps as `torch.optim.lr_scheduler.OneCycleLR` does: the last step of each phase is its
    end.
    """
    top, last = warmup_steps - 1, max(total_steps - 1, warmup_steps)

    def factor(applied: int) -> float:
        if applied < top:
            return cosine(1.0 - applied / top, 1 / 25)
        return cosine(min(1.0, (applied - top) / (last - top)), final)

    return factor


class RecipeSchedule:
    """Learning rates by a recipe's `schedule`: a function of the applied updates, or a torch
    scheduler. A torch scheduler gets a stand-in optimizer and is stepped once for each applied
    update, so a resumed run needs no scheduler state."""

    def __init__(self, schedule: Callable[[Any], Any], base: Sequence[float]) -> None:
        """`base`: the rate of each group. Raises `RecipeError`."""
        self._schedule, self._base = schedule, list(base)
        self.num_groups = len(self._base)
        self._scheduler: LRScheduler | None = None
        self._done = 0
        if not self._is_a_function():
            self._begin()

    def rates(self, applied: int) -> list[float]:
        """Return the learning rates of the next update. Raises `RecipeError`."""
        if self._scheduler is None:
            factor = self._schedule(applied)
            if not _is_rate(factor):
                raise RecipeError(
                    f"recipe.schedule({applied}) is {factor!r:.80}; it must be the factor of the "
                    "learning rates, a number from 0 on"
                )
            return [rate * float(factor) for rate in self._base]
        if applied < self._done:  # the run was rolled back to an earlier checkpoint
            self._begin()
        while self._done < applied:
            self._scheduler.optimizer.step()
            self._scheduler.step()
            self._done += 1
        return [float(group["lr"]) for group in self._scheduler.optimizer.param_groups]

    def _is_a_function(self) -> bool:
        try:
            return _is_rate(self._schedule(0))
        except Exception:  # whatever a function that wants an optimizer raises for a number
            return False

    def _begin(self) -> None:
        groups = [{"params": [torch.zeros(())], "lr": rate} for rate in self._base]
        try:
            scheduler = self._schedule(_Rates(groups, {"lr": 0.0}))
        except Exception as error:
            raise RecipeError(
                f"recipe.schedule takes neither a number of updates nor an optimizer: {error!r}. "
                "Return a factor for a number; or a scheduler of torch's for an optimizer, one "
                "that sets learning rates alone (cycle_momentum=False)"
            ) from error
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            raise RecipeError(
                f"recipe.schedule returned {scheduler!r:.80}; for a number of updates it must "
                "return the factor of the learning rates, or for an optimizer an LRScheduler of "
                "torch's that steps with updates. For ReduceLROnPlateau set schedule.name=plateau"
            )
        self._scheduler, self._done = scheduler, 0


class _Rates(torch.optim.Optimizer):
    """A stand-in for an optimizer that torch's schedulers receive. It has learning rates alone, so
    a scheduler that would set more raises an error.
    """

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing; the scheduler counts the calls."""


def _is_rate(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0

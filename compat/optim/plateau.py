"""Learning rates that follow a metric: they are stepped with its value after each evaluation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

__all__ = ["GreedyLR", "Plateau"]


class Plateau(ReduceLROnPlateau):
    """torch's, whose state holds finite numbers only, so that it can be written as JSON."""

    def state_dict(self) -> dict[str, Any]:
        """Its state, without the infinities that a new one begins with."""
        state = super().state_dict()
        return {name: value for name, value in state.items() if _is_finite(value)}


class GreedyLR(LRScheduler):
    """Raises the rate while a metric improves and lowers it while it does not.

    After more than `patience` steps in a row of one kind the rate is divided, or multiplied, by
    `factor`, between `min_lr` and `max_lr` (numbers, or one a group), and rests for `warmup` or
    `cooldown` steps. A change of at most `eps` is not made. After `reset_start` reductions at the
    lowest rate it begins anew at the first one. `smooth`: the metric is averaged over the last
    `window_size` values. `threshold`: what counts as better, absolutely or relatively. See
    https://arxiv.org/abs/2512.14527.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.95,
        patience: int = 10,
        threshold: float = 1e-6,
        threshold_mode: str = "abs",
        cooldown: int = 0,
        warmup: int = 0,
        min_lr: float | Sequence[float] = 1e-3,
        max_lr: float | Sequence[float] = 1.0,
        eps: float = 1e-8,
        verbose: bool = False,
        smooth: bool = False,
        window_size: int = 50,
        reset_start: int = 500,
    ) -> None:
        _check(mode, threshold_mode, factor)
        self.optimizer = optimizer
        self.mode, self.threshold, self.threshold_mode = mode, threshold, threshold_mode
        self.factor, self.patience, self.eps, self.verbose = factor, patience, eps, verbose
        self.cooldown, self.warmup, self.reset_start = cooldown, warmup, reset_start
        self.min_lrs = _one_a_group(min_lr, optimizer, "min_lr")
        self.max_lrs = _one_a_group(max_lr, optimizer, "max_lr")
        self.first_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.window: deque[float] = deque(maxlen=window_size if smooth else 1)
        self.last_epoch = 0
        self._last_lr = [*self.first_lrs]
        self._begin()

    def _begin(self) -> None:
        self.best: float | None = None
        self.num_good = self.num_bad = self.num_resting = 0
        self.resets_in = self.reset_start
        self.window.clear()

    def step(self, metrics: float, epoch: int | None = None) -> None:  # type: ignore[override]
        """Judge a new value of the metric."""
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self.window.append(float(metrics))
        current = sum(self.window) / len(self.window)
        if self.num_resting > 0:
            self.num_resting -= 1
            self.num_good = self.num_bad = 0
        elif self._is_better(current):
            self.best = current
            self.num_good, self.num_bad = self.num_good + 1, 0
        else:
            self.num_good, self.num_bad = 0, self.num_bad + 1
        if self.num_good > self.patience:
            self._raise_rates()
        elif self.num_bad > self.patience:
            self._lower_rates()
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]

    def _is_better(self, current: float) -> bool:
        if self.best is None:
            return math.isfinite(current)
        sign = 1.0 if self.mode == "max" else -1.0
        if self.threshold_mode == "rel":
            bar = self.best * (1.0 + sign * self.threshold)
        else:
            bar = self.best + sign * self.threshold
        return current > bar if self.mode == "max" else current < bar

    def _raise_rates(self) -> None:
        for group, top in self._bounded(self.max_lrs):
            self._set(group, min(group["lr"] / self.factor, top), 1.0)
        self.resets_in = self.reset_start
        self.num_good, self.num_resting = 0, self.warmup

    def _lower_rates(self) -> None:
        for group, low in self._bounded(self.min_lrs):
            self._set(group, max(group["lr"] * self.factor, low), -1.0)
        if all(group["lr"] <= low for group, low in self._bounded(self.min_lrs)):
            self.resets_in -= 1
            if self.resets_in <= 0:
                self._begin()
                for group, lr in self._bounded(self.first_lrs):
                    group["lr"] = lr
        self.num_bad, self.num_resting = 0, self.cooldown

    def _bounded(self, bounds: list[float]) -> list[tuple[dict[str, Any], float]]:
        """Each parameter group with its number."""
        return list(zip(self.optimizer.param_groups, bounds, strict=True))

    def _set(self, group: dict[str, Any], lr: float, direction: float) -> None:
        if direction * (lr - group["lr"]) > self.eps:
            if self.verbose:
                print(f"step {self.last_epoch}: learning rate {group['lr']:.4e} becomes {lr:.4e}")
            group["lr"] = lr

    def get_last_lr(self) -> list[float | Tensor]:
        """The rates in use, one a group."""
        return self._last_lr

    def state_dict(self) -> dict[str, Any]:
        """All but the optimizer, in JSON types."""
        state = {name: value for name, value in vars(self).items() if name != "optimizer"}
        return state | {"window": list(self.window), "window_size": self.window.maxlen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; the optimizer's rates too."""
        state = dict(state_dict)
        self.window = deque(state.pop("window"), maxlen=state.pop("window_size"))
        vars(self).update(state)
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _one_a_group(value: float | Sequence[float], optimizer: Optimizer, name: str) -> list[float]:
    num_groups = len(optimizer.param_groups)
    values = [value] * num_groups if isinstance(value, int | float) else list(value)
    if len(values) != num_groups:
        raise ValueError(f"{name} has {len(values)} values for {num_groups} parameter groups")
    return [float(one) for one in values]


def _check(mode: str, threshold_mode: str, factor: float) -> None:
    if mode not in ("min", "max"):
        raise ValueError(f"mode is {mode!r}; it is 'min' or 'max'")
    if threshold_mode not in ("abs", "rel"):
        raise ValueError(f"threshold_mode is {threshold_mode!r}; it is 'abs' or 'rel'")
    if not 0.0 < factor < 1.0:
        raise ValueError(f"factor is {factor}; it lies between 0 and 1")

"""One update: microbatches -> weighted loss -> update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .contract import Engine, Outcome, Session
from .errors import CollectiveFailed, in_update, ran_out
from .recipe import Batch, Recipe, check_loss

__all__ = ["StepResult", "Stepper"]


class StepResult(NamedTuple):
    """The result of one update; tensors stay on the device."""

    loss: Tensor
    """0-d; its mean over feeders is the mean loss over the items of the global batch."""
    items: float
    """Items of the global batch."""
    requests: list[float]
    """For each number given as a request, its sum over ranks."""
    outcome: Outcome


class Stepper:
    """Runs updates so that the gradient is that of one full batch in one process (law 1).

    The items of the whole global batch are counted before the first backward, and each
    microbatch's sum of losses is divided by them, so ragged microbatches, accumulation and world
    size do not change the gradient.
    """

    def __init__(self, recipe: Recipe, engine: Engine, session: Session) -> None:
        self.engine = engine
        self.loss_of = getattr(recipe.loss, "of_update", lambda number: recipe.loss)
        self.take_over = getattr(engine, "step", None) or recipe.step  # of a pipeline, say
        self.session, world = session, session.world
        self.num_feeders, self.counts_once = world.num_feeders, world.counts_once
        self._agreed: Callable[[], list[float]] = list
        self._sums: list[float] | None = None
        self._number, self._weight, self._as_tensor = 0, math.nan, torch.empty(0)

    def __call__(
        self,
        microbatches: Iterator[tuple[Batch, float]],
        num_microbatches: int,
        num_items: float,
        before_update: Callable[[], None],
        requests: Sequence[float] = (),
        number: int = 0,
    ) -> StepResult:
        """One update over the next `num_microbatches` of `microbatches`.

        Each is a batch on the device and what it weighs: 1, less where its samples are repeated,
        0 when it only runs so that ranks stay together. `num_items`: this reader's.
        `before_update` is called right before the update. `requests`: numbers to add up over
        ranks on the way. `number`: of this step; raises `CollectiveFailed` where ranks differ.
        """
        self._agreed, self._sums = self.session.tally((number, num_items, *requests)), None
        self._number, self.loss = number, self.loss_of(number)
        total: Tensor | None = None
        for index in range(num_microbatches):
            batch, weight = next(microbatches)
            with self.engine.microbatch(last=index == num_microbatches - 1):
                if self.take_over is None:
                    loss = self._forward_backward(batch, weight)
                else:
                    microstep = _Microstep(self, index, num_microbatches, weight)
                    loss = self.take_over(self.engine.module, batch, microstep)
            total = loss if total is None else total + loss
        assert total is not None
        before_update()
        sums = self.sums()
        try:
            outcome = self.engine.update()
        except Exception as error:
            if ran_out(error):
                raise in_update(error) from error
            raise
        return StepResult(total, sums[0], sums[1:], outcome)

    def sums(self) -> list[float]:
        """The items of the global batch, and the requests, summed over ranks. Waits once a step."""
        if self._sums is None:
            numbers, items, *requests = self._agreed()
            self._sums = [items * self.counts_once, *requests]
            if numbers != self._number * self.session.world.size:
                raise CollectiveFailed(self._who_is_where())
        return self._sums

    def _who_is_where(self) -> str:
        """All ranks ask, since all saw that their numbers differ."""
        steps = self.session.exchange(self._number)
        where = ", ".join(f"rank {rank} in step {step}" for rank, step in enumerate(steps))
        return (
            f"ranks are in different steps: {where}. Each must run the same steps: look for code "
            "that leaves steps out, or stops, on some ranks only"
        )

    def backward(self, loss: Tensor, weight: float) -> Tensor:
        """`weight * loss`, detached, once its gradient has been added."""
        if loss.element_size() < 4:
            loss = loss.float()  # the weight must not be rounded to bfloat16
        value = loss.detach()
        if weight != self._weight or value.dtype != self._as_tensor.dtype:
            self._weight, self._as_tensor = weight, value.new_full((), weight)
        # a loss that is not finite makes its weight NaN, and so every gradient, so that no rank
        # applies it: the gradient of an overflowed loss may be finite
        factor = torch.add(self._as_tensor, value, alpha=0.0)
        self.engine.backward(loss, factor)
        return value * factor

    def _forward_backward(self, batch: Batch, weight: float) -> Tensor:
        with self.engine.autocast():
            loss = self.loss(self.engine.module, batch)
        check_loss(loss)
        items = self.sums()[0]  # waited for behind the first forward, and only then needed
        return self.backward(loss, weight * self.num_feeders / items if items else 0.0)


@dataclass(slots=True)
class _Microstep:
    """See `Microstep` in the contract."""

    stepper: Stepper
    index: int
    num_microbatches: int
    weight: float

    @property
    def last(self) -> bool:
        return self.index == self.num_microbatches - 1

    @property
    def num_feeders(self) -> int:
        return self.stepper.num_feeders

    def num_items(self) -> float:
        return self.stepper.sums()[0]

    def autocast(self) -> AbstractContextManager[Any]:
        return self.stepper.engine.autocast()

    def backward(self, loss: Tensor, weight: float = 1.0) -> Tensor:
        return self.stepper.backward(loss, self.weight * weight)

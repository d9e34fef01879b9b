"""One update: microbatches -> weighted loss -> update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .contract import Engine, Outcome, Session
from .errors import CollectiveFailed, out_of_memory_in_update, ran_out
from .optional import TakesOverStep
from .recipe import Batch, Microstep, Recipe, check_loss

__all__ = ["StepPlace", "StepResult", "Stepper"]


class StepPlace(NamedTuple):
    """A step and its samples: the same on all ranks."""

    step: int = 0
    epoch: int = 0
    start: int = 0
    num_samples: int = 0
    digest: int = 0


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
    size do not change the gradient."""

    def __init__(self, recipe: Recipe, engine: Engine, session: Session) -> None:
        self.engine = engine
        self.loss_of = getattr(recipe.loss, "of_update", lambda number: recipe.loss)
        self.take_over = engine.step if isinstance(engine, TakesOverStep) else recipe.step
        self.session, world = session, session.world
        self.num_feeders, self._sum_weight = world.num_feeders, world.replicated_sum_weight
        self._agreed: Callable[[], list[float]] = list
        self._sums: list[float] | None = None
        self._weight, self._as_tensor = math.nan, torch.empty(0)

    def __call__(
        self,
        microbatches: Iterator[tuple[Batch, float]],
        num_microbatches: int,
        num_items: float,
        before_update: Callable[[], None],
        requests: Sequence[float],
        place: StepPlace,
    ) -> StepResult:
        """One update over the next `num_microbatches` of `microbatches`.

        Each is a batch on the device and what it weighs: 1, less where its samples are repeated,
        0 when it only runs so that ranks stay together. `num_items`: this reader's.
        `before_update` is called right before the update. `requests`: numbers to add up over
        ranks on the way. `place`: raises `CollectiveFailed` where ranks differ in it."""
        self.compare(place, num_items, requests)
        self.loss = self.loss_of(place.step)
        total: Tensor | None = None
        for index in range(num_microbatches):
            batch, weight = next(microbatches)
            with self.engine.microbatch(last=index == num_microbatches - 1):
                if self.take_over is None:
                    loss = self._forward_backward(batch, weight)
                else:
                    microstep = Microstep(
                        index,
                        num_microbatches,
                        self.num_feeders,
                        lambda: self.sums()[0],
                        self.engine.autocast,
                        self.backward,
                        weight,
                    )
                    loss = self.take_over(self.engine.module, batch, microstep)
            total = loss if total is None else total + loss
        assert total is not None
        before_update()
        sums = self.sums()
        try:
            outcome = self.engine.update()
        except Exception as error:
            if ran_out(error):
                raise out_of_memory_in_update(error) from error
            raise
        return StepResult(total, sums[0], sums[1:], outcome)

    def compare(self, place: StepPlace, num_items: float, requests: Sequence[float]) -> None:
        """Start to compare `place` over ranks, on all of them; `sums` waits for it, and raises."""
        self._place, self._key, self._sums = place, hash(place) % (1 << 20), None
        self._agreed = self.session.tally((self._key, self._key**2, num_items, *requests))

    def sums(self) -> list[float]:
        """The items of the global batch, and the requests, summed over ranks. Waits once a step."""
        if self._sums is None:
            keys, squares, items, *requests = self._agreed()
            self._sums = [items * self._sum_weight, *requests]
            size = self.session.world.size  # one of both differs, on all ranks, if one key does
            if (keys, squares) != (self._key * size, self._key**2 * size):
                raise CollectiveFailed(self._describe_places())
        return self._sums

    def _describe_places(self) -> str:
        """Describe the place of each rank. All ranks call this, since all saw that they differ."""
        places = (StepPlace(*each) for each in self.session.exchange(self._place))
        where = ", ".join(
            f"rank {i} in step {place.step}, with {place.num_samples or 'no more'} samples after "
            f"{place.start} of epoch {place.epoch} (digest {place.digest})"
            for i, place in enumerate(places)
        )
        return (
            f"ranks are in different steps, or have different data: {where}. Each must run the "
            "same steps: look for code that leaves some out, or stops, on some ranks only. And "
            "each must read the whole stream, in one order, of which the run gives it a share; "
            "Batches(loader) takes what each rank has of its own"
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
        items = self.sums()[0]  # ranks wait for it after the first forward, not before
        return self.backward(loss, weight * self.num_feeders / items if items else 0.0)

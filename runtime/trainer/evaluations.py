"""The evaluations of one run: each data set is measured, within memory, and announced once a
step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..data.open_dataset import Source, once
from ..kernel.contract import Engine, Session
from ..kernel.errors import ran_out
from ..kernel.evaluate import summarise
from ..kernel.events import Evaluated, Event
from ..kernel.recipe import Recipe
from .left_out import LeftOut
from .metric_names import metrics_by_name
from .out_of_memory import OutOfMemoryPolicy
from .own_gradients import evaluate

__all__ = ["Evaluations"]


class Evaluations:
    """Measures the evaluation data of one run. All ranks call every method in the same order.
    `open_data`: `open_dataset` with the arguments that all data of the run share. `with_weights()`:
    a context manager around each measurement."""

    def __init__(
        self,
        session: Session,
        engine: Engine,
        recipe: Recipe,
        open_data: Callable[..., Source],
        micro_batch: int,
        memory: OutOfMemoryPolicy,
        announce: Callable[[Event], None],
        with_weights: Callable[[], AbstractContextManager[Any]],
        left_out: LeftOut,
        max_batches: int | None = None,
    ) -> None:
        self.session, self.engine, self.recipe = session, engine, recipe
        self.open_data, self.micro_batch = open_data, micro_batch
        self.memory, self.announce, self.with_weights = memory, announce, with_weights
        self.left_out, self.max_batches = left_out, max_batches
        self.metrics: dict[str, dict[str, float]] = {}
        """The latest metrics of each data set."""
        self._step = -1

    def run(self, step: int) -> float:
        """Measure all data sets unless this step was measured already. Return the seconds taken,
        including the observers' time: an observer may draw a page."""
        began = time.perf_counter()
        for name, data in self.recipe.eval_data.items() if step != self._step else ():
            started = time.perf_counter()
            metrics = self.metrics[name] = self._measured(name, data)
            seconds = time.perf_counter() - started
            self.announce(Evaluated(step, name, metrics, seconds))
        self._step = step
        return time.perf_counter() - began

    def to_json(self, step: int) -> dict[str, float]:
        """Return the finite metrics of this step; see `metrics_by_name`."""
        if step != self._step:
            return {}
        named = metrics_by_name(self.metrics)
        return {key: value for key, value in named.items() if math.isfinite(value)}

    def restore(self, metrics: Mapping[str, float], step: int) -> None:
        """Restore the result of `to_json` at that step."""
        if not metrics:
            return
        self._step = step
        self.metrics = {
            name: {
                key.removeprefix(f"{name}."): value
                for key, value in metrics.items()
                if key.startswith(f"{name}.")
            }
            for name in self.recipe.eval_data
        }

    def _measured(self, name: str, data: Any) -> dict[str, float]:
        def summarise_and_note(sums: Mapping[str, Tensor]) -> Mapping[str, float]:
            self.left_out.evaluated(name, sums)
            return summarise(self.recipe, sums)

        recipe = replace(self.recipe, summarise=summarise_and_note)
        while True:
            size = self.micro_batch
            source = self.open_data(
                data,
                seed=0,
                global_batch=size * self.session.world.num_readers,
                micro_batch=size,
                num_epochs=1,
            )
            try:
                with self.with_weights():
                    groups = once(source, self.max_batches)
                    return evaluate(self.session, self.engine, recipe, groups)
            except Exception as error:
                if not ran_out(error):
                    raise
                cause = str(error)
            doing = f"the evaluation {name!r}"
            self.micro_batch = self.memory.less(doing, "evaluate.micro_batch", size, cause, data)

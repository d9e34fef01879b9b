"""fit: opens a driver and trains on it, and retries with smaller microbatches if memory runs
out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from .. import lost_ranks
from ..checkpoint import storage_of
from ..checkpoint.background import background_finished
from ..data.first_samples import on_first_samples
from ..data.fork_gc import stay_forkable
from ..data.parent import end_with_launcher
from ..kernel.errors import SaveFailed
from ..kernel.events import Observer
from ..kernel.paths import Url, place
from ..kernel.recipe import Recipe
from ..registry import refuse_unpromised, usable_driver
from .late_ranks import flight_records_kept, propagate_errors
from .out_of_memory import with_remembered
from .preemption_notice import preempt_on_notice
from .recipe_checks import (
    check_model,
    check_observers,
    check_optimization,
    check_recipe,
    report_exits,
)
from .recovery import Recovery
from .result import Result, RetryWithSmallerBatch
from .run import Run
from .run_lock import RunLock
from .setting_values import override
from .settings import Settings
from .signals import preempt_on_signals, stopping_before_start
from .weight_averages import refuse_no_average

__all__ = ["Result", "fit"]


def fit(
    recipe: Recipe,
    settings: Settings | None = None,
    *,
    backend: str = "auto",
    backend_options: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | Url | None = None,
    resume: str | os.PathLike[str] | Url | None = None,
    observers: Sequence[Observer] | Callable[[], Sequence[Observer]] = (),
    finish: Callable[[nn.Module], Any] | None = None,
) -> Result:
    """Train `recipe` on this rank. `drivetrain.fit` explains the arguments and the errors.

    Shows nothing, and writes checkpoints alone to `out` (`checkpoints/checkpoint-000100`). Every
    rank calls it. `observers`: or a function that returns them, which is called again when this
    rank has another number since others have died.
    """
    check_recipe(recipe)
    settings = settings or Settings()
    own = observers() if callable(observers) else observers
    check_observers(own, "observers")
    recipe = on_first_samples(recipe, settings.data.overfit)
    check_optimization(recipe, settings)
    refuse_no_average(settings)
    end_with_launcher()
    driver = usable_driver(backend)
    options = override(driver.options_type(), backend_options or {}, "backend.")
    recovery = Recovery(settings, recipe)
    requests, saves = recovery.requests, out is not None
    folder = None if out is None else place(out)
    if resume is not None:
        place(resume)  # raises
    if folder is not None:
        storage_of(folder)  # raises if no installed package reaches it
    lock = None if folder is None else RunLock(folder)
    starts: list[Settings] = []

    def attempt(
        settings: Settings, resume: str | os.PathLike[str] | Url | None
    ) -> Result | RetryWithSmallerBatch | None:
        """Train to the end, or until memory runs out and smaller microbatches may fit; None: until
        a rank dies without which the others can continue."""
        try:
            return start(settings, resume)
        except Exception as error:
            if not recovery.continues_after(error):
                raise
            return None

    def start(
        settings: Settings, resume: str | os.PathLike[str] | Url | None
    ) -> Result | RetryWithSmallerBatch:
        plan = settings.plan(options)
        refuse_unpromised(driver, plan)
        check_model(driver, recipe, plan)
        with ExitStack() as opened:
            with nullcontext() if lost_ranks.generation() else stopping_before_start(requests):
                session = opened.enter_context(driver.open(plan))
                stay_forkable()
            opened.enter_context(propagate_errors(session, driver.capabilities(plan)))
            notices = settings.preemption_notice
            again = bool(starts or lost_ranks.generation())
            starts.append(settings)
            opened.enter_context(preempt_on_notice(notices, requests, saves, again))
            if settings.detect_anomaly:
                opened.enter_context(torch.autograd.set_detect_anomaly(True))

            def train() -> Result | RetryWithSmallerBatch:
                shared = recovery.shared(session, resume)
                watched = observers() if callable(observers) else own
                run = Run(driver, session, plan, recipe, settings, lock, watched, requests, aside)
                if shared is not None:
                    recovery.restore(run, shared)
                elif resume is not None:
                    run.resume(resume)
                recovery.keep(run)
                return run.execute(finish)

            return train()  # a function, so that the model is freed before the session ends

    with report_exits(), preempt_on_signals(requests, saves), ExitStack() as stack:
        stack.callback(recovery.close)
        if lock is not None:
            stack.callback(lock.release)

        def aside() -> Path:
            return Path(stack.enter_context(TemporaryDirectory(prefix="drivetrain-")))

        with flight_records_kept(folder), background_finished():
            recovery.await_place()
            settings = with_remembered(settings, folder)
            outcome = attempt(settings, resume)
            while not isinstance(outcome, Result):
                if outcome is not None:
                    recovery.drop()
                    settings, resume = outcome.settings, outcome.resume or resume
                outcome = attempt(settings, resume)
            _refuse_unsaved(outcome)
            return outcome


def _refuse_unsaved(result: Result) -> None:
    """Raises `SaveFailed` for a run that should have saved but never could: all its training is
    lost. A preempted run is not refused: it is started again in any case."""
    if result.save_error and not result.num_saved and result.reason != "preempted":
        raise SaveFailed(
            f"{result.reason} at step {result.step}, which is not saved: {result.save_error}. None "
            "of the checkpoints of this run was saved; `finish` has been called with the model"
        )

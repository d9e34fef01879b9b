"""fit: a driver is opened and a run goes on it, again where memory ran out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from ..checkpoint import storage_of
from ..checkpoint.background import background_finished
from ..data.parent import end_with_launcher
from ..kernel.events import Observer, Requests
from ..kernel.paths import Url, place
from ..kernel.recipe import Recipe
from ..kernel.registry import refuse_unpromised, usable_driver
from .late_ranks import flight_records_kept, others_told
from .out_of_memory import with_remembered
from .recipe_checks import check_model, check_optimization, check_recipe, exits_told
from .result import Result, RetryWithSmallerBatch
from .run import Run
from .run_lock import RunLock
from .setting_values import override
from .settings import Settings
from .signals import preempt_on_signals
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
    observers: Sequence[Observer] = (),
    finish: Callable[[nn.Module], Any] | None = None,
) -> Result:
    """Train `recipe` as `settings` say on the driver called `backend`; every rank calls it.

    `out`: the run folder, where checkpoints go (`checkpoints/checkpoint-000100`), or a URL such as
    `s3://bucket/run`; None saves nothing. `resume`: None starts a new training; `auto` continues
    from the newest complete checkpoint in `out`, if there is one; a path or URL is a checkpoint or
    a folder of them. One run at a time writes to a folder (see `lock`). `finish` is called at the
    end with the user's own module, whole and in evaluation mode, on every rank.

    Raises `UsageError` (something asked for is not possible; nothing was started), `SaveFailed`,
    `DataFailed`, `CollectiveFailed`, and `RecipeFailed` where `sys.exit` is called; other errors of
    the recipe are raised unchanged.
    """
    check_recipe(recipe)
    settings = settings or Settings()
    check_optimization(recipe, settings)
    refuse_no_average(settings)
    end_with_launcher()
    driver = usable_driver(backend)
    options = override(driver.options_type(), backend_options or {}, "backend.")
    requests, folder = Requests(), None if out is None else place(out)
    if resume is not None:
        place(resume)  # raises
    if folder is not None:
        storage_of(folder)  # raises where nothing that is installed reaches it
    lock = None if folder is None else RunLock(folder)

    def attempt(
        settings: Settings, resume: str | os.PathLike[str] | Url | None
    ) -> Result | RetryWithSmallerBatch:
        """Until the end, or until memory runs out and smaller microbatches may do."""
        plan = settings.plan(options)
        refuse_unpromised(driver, plan)
        check_model(driver, recipe, plan)
        with driver.open(plan) as session, others_told(session, driver.capabilities(plan)):

            def train() -> Result | RetryWithSmallerBatch:
                run = Run(driver, session, plan, recipe, settings, lock, observers, requests, aside)
                if resume is not None:
                    run.resume(resume)
                return run.go(finish)

            return train()  # a function, so that the model is freed before the session ends

    with exits_told(), preempt_on_signals(requests), ExitStack() as stack:
        if lock is not None:
            stack.callback(lock.release)

        def aside() -> Path:
            return Path(stack.enter_context(TemporaryDirectory(prefix="drivetrain-")))

        with flight_records_kept(folder), background_finished():
            outcome = attempt(with_remembered(settings, folder), resume)
            while isinstance(outcome, RetryWithSmallerBatch):
                outcome = attempt(outcome.settings, outcome.resume or resume)
            return outcome

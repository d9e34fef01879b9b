"""fit: the order of events, stopping and resuming."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from .agreement import agree, ask_first, plain, start_conditions
from .checkpoint import (
    CHECKPOINTS,
    CheckpointReader,
    CheckpointStore,
    Place,
    Url,
    place,
    storage_of,
)
from .contract import Driver, Engine, Plan, Recipe, Session
from .cut import fitting_size
from .data import Group, Source, length_of
from .errors import (
    DataError,
    NonFiniteTraining,
    OutOfMemory,
    RecipeError,
    SettingError,
)
from .evaluate import evaluate
from .events import (
    Evaluated,
    Event,
    Logged,
    Observer,
    Request,
    Resumed,
    RunEnded,
    RunStarted,
    StepEnded,
    StepSkipped,
    Warned,
)
from .memory import Memory, ran_out, with_remembered
from .progress import Window
from .registry import refuse_unpromised, usable_driver
from .requests import Requests
from .resume import differences, find_checkpoint
from .saves import Saves
from .schedule import build_schedule
from .settings import Settings, override
from .sources import once, open_source
from .step import StepResult
from .training import Then, Training

__all__ = ["Result", "fit"]


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    step: int
    reason: str
    """`finished`, `stopped` or `preempted`."""
    loss: float
    """The last one logged; NaN when none was."""
    metrics: Mapping[str, Mapping[str, float]]
    """The last ones of each evaluation data set."""
    checkpoint: Place | None
    """The newest that this run saved or resumed from."""
    finish: Any = None
    """What `finish` returned."""


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
    `s3://bucket/run`; None saves nothing. `resume`: None starts anew; `auto` continues from the
    newest complete checkpoint in `out`, if there is one; a path or URL is a checkpoint or a folder
    of them. `finish` is called at the end with the user's own module, whole and in evaluation mode,
    on every rank.

    Raises `UsageError` (something asked for cannot be had; nothing was started), `SaveFailed`,
    `WorkerFailed` and `CollectiveFailed`.
    """
    if recipe.train_data is None:
        raise RecipeError("the recipe has no train_data; give it a data set or a stream")
    driver = usable_driver(backend)
    options = override(driver.options_type(), backend_options or {}, "backend.")
    requests, folder = Requests(), place(out) if out else None
    if folder is not None:
        storage_of(folder)  # raises where nothing that is installed reaches it

    def attempt(settings: Settings, resume: str | os.PathLike[str] | Url | None) -> Result | _Again:
        """Until the end, or until memory runs out and smaller microbatches may do."""
        plan = settings.plan(options)
        refuse_unpromised(driver, plan)
        with driver.open(plan) as session:

            def train() -> Result | _Again:
                run = _Run(
                    driver, session, plan, recipe, settings, folder, observers, requests, aside
                )
                if resume is not None:
                    run.resume(resume)
                return run.go(finish)

            return train()  # a function, so that the model is let go before the session ends

    with requests.from_signals(), ExitStack() as stack:

        def aside() -> Path:
            return Path(stack.enter_context(TemporaryDirectory(prefix="drivetrain-")))

        outcome = attempt(with_remembered(settings or Settings(), folder), resume)
        while isinstance(outcome, _Again):
            outcome = attempt(outcome.settings, outcome.resume or resume)
        return outcome


@dataclass(frozen=True)
class _Again:
    """How to go on where memory ran out."""

    settings: Settings
    resume: Place | None
    """From what the run itself saved; None: as it began."""


class _Run:
    """One call of `fit` on one rank."""

    def __init__(
        self,
        driver: Driver,
        session: Session,
        plan: Plan,
        recipe: Recipe,
        settings: Settings,
        out: Place | None,
        observers: Sequence[Observer],
        requests: Requests,
        aside: Callable[[], Path],
    ) -> None:
        started = time.perf_counter()
        world = session.world
        self.driver, self.session, self.settings, self.out = driver, session, settings, out
        self.observers, self.requests, self.started = observers, requests, started
        self.aside = aside
        """Makes a folder that lasts until `fit` returns."""
        self.recipe = dataclasses.replace(
            recipe, optimizer=recipe.optimizer or settings.optimizer.build
        )
        agree(session, start_conditions(driver, plan, recipe, settings))
        if out is not None:
            ask_first(session, lambda: storage_of(out).check(out))
        for name, data in recipe.eval_data.items():
            if length_of(data) == 0:
                raise DataError(f"evaluation data set {name!r} is empty; leave it out or fill it")
        able = driver.capabilities(plan)
        self.fixed_size = able.static_shapes
        largest = -(-settings.global_batch // world.num_feeders)
        self.micro_batch = plan.micro_batch or largest
        if self.fixed_size:
            self.micro_batch = fitting_size(largest, self.micro_batch)
        self.eval_micro_batch = settings.evaluate.micro_batch or self.micro_batch
        self.memory = Memory(settings, world, out, able.saves_memory, self._emit)
        self.source = self._open(
            recipe.train_data,
            seed=settings.seed,
            global_batch=settings.global_batch,
            micro_batch=self.micro_batch,
            num_epochs=None if settings.steps else math.ceil(settings.epochs),
            shuffle=settings.data.shuffle,
            drop_last=settings.data.drop_last,
            # what is fetched ahead must not draw from the generators that a checkpoint holds
            isolate_random=able.feeds_ahead or None,
        )
        self.total_steps = _total_steps(settings, self.source.steps_per_epoch)
        try:
            self.engine: Engine = session.prepare(self.recipe)
        except Exception as error:
            if ran_out(error):
                raise OutOfMemory(
                    f"no memory for the model: {error}; {self.memory.advice()}"
                ) from error
            raise
        session.seed(settings.seed + 1 + world.rank)
        self.base_rates = [group["lr"] for group in self.engine.param_groups]
        self.schedule = build_schedule(
            total_steps=self.total_steps, **dataclasses.asdict(settings.schedule)
        )
        self.saves = self._saves_to(out / CHECKPOINTS) if out is not None else None
        self.training = Training(
            self.recipe, session, self.engine, self.source, self.total_steps, self, requests
        )
        self.first_step = 0
        self.metrics: dict[str, dict[str, float]] = {}
        self.loss = math.nan
        self.evaluated_at = -1
        self.resumed_from: Place | None = None

    def _saves_to(self, folder: Place) -> Saves:
        keep = self.settings.checkpoint
        store = CheckpointStore(
            folder,
            keep_last=keep.keep_last,
            keep_best=keep.keep_best,
            best_metric=keep.best_metric,
            best_mode=keep.best_mode,
            keep_every=keep.keep_every,
        )
        return Saves(
            store,
            self._what_to_save,
            self._emit,
            self._leave_out,
            stop_on_error=keep.stop_on_error,
        )

    def _open(self, data: Any, **options: Any) -> Source:
        """The source of training or evaluation data."""
        return open_source(
            data,
            self.session,
            collate=self.recipe.collate,
            count_items=self.recipe.count_items,
            fixed_size=self.fixed_size,
            workers=self.settings.data.workers,
            **options,
        )

    def resume(self, source: str | os.PathLike[str] | Url) -> None:
        """Take the state of the newest complete checkpoint of `source`, or of that checkpoint."""
        left_out: list[str] = []
        path = find_checkpoint(
            self.session,
            source,
            self.out,
            verify=self.settings.checkpoint.verify,
            tell=left_out.append,
        )
        if path is None:
            for note in left_out:
                self._emit(Warned(note))
            return
        reader, world = CheckpointReader(path), self.session.world
        manifest = reader.manifest
        seeded = self.training.restore(reader)
        step = self.training.progress.step
        self.first_step, self.resumed_from = step, path
        if self.saves is not None:
            self.saves.is_saved(step)
        if metrics := manifest.state.get("metrics"):
            self.evaluated_at = step
            self.metrics = {
                name: {
                    key.removeprefix(f"{name}."): value
                    for key, value in metrics.items()
                    if key.startswith(f"{name}.")
                }
                for name in self.recipe.eval_data
            }
        notes = differences(manifest, self.settings, self.driver.name, world.size)
        notes = (*left_out, *notes)
        if not seeded:
            self.session.seed(self.settings.seed + 1 + world.rank + step)
            notes += ("no random state for this rank in the checkpoint: seeded anew",)
        self._emit(Resumed(path, step, notes))

    # --- the loop -------------------------------------------------------------------------

    def go(self, finish: Callable[[nn.Module], Any] | None) -> Result | _Again:
        """To the end, or to where memory runs out."""
        self._emit(
            RunStarted(
                backend=self.driver.name,
                world=self.session.world,
                settings=self.settings,
                total_steps=self.total_steps,
                steps_per_epoch=self.source.steps_per_epoch,
                num_samples=self.source.num_samples,
                num_parameters=self.engine.num_parameters,
                first_step=self.first_step,
                out=self.out,
                flops_per_item=self.recipe.flops_per_item,
            )
        )
        then = self._train()
        if isinstance(then, _Again):
            return then
        done = self.training.progress.step
        if then is Then.FINISHED and self.settings.steps and done < self.settings.steps:
            self._emit(Warned(f"the data ended after {done} of {self.settings.steps} steps"))
        if self.training.window.has_grown(self.training.progress):
            self._log()  # and the window stays open: a longer run logs as if it had not ended here
        preempted = then is Then.PREEMPTED
        if not preempted and self.settings.evaluate.at_end:
            self._evaluate()
        if preempted or self.settings.checkpoint.at_end:
            self._save(behind=False)
        if self.saves is not None:
            self.saves.close()
        finished = None
        if finish is not None and not preempted:
            with self.engine.full_params() as module:
                module.eval()
                finished = finish(module)
        step, reason = self.training.progress.step, then.value
        self._emit(RunEnded(step, reason, time.perf_counter() - self.started))
        return Result(step, reason, self.loss, self.metrics, self._checkpoint(), finished)

    def _train(self) -> Then | _Again:
        try:
            return self.training.run()
        except OutOfMemory as error:
            raise OutOfMemory(f"{error}; {self.memory.advice()}") from error
        except Exception as error:
            if not ran_out(error):
                raise
            cause = str(error)
        # here, where nothing holds what the failed step held
        step = self.training.progress.step
        size = self.memory.less(
            f"step {step + 1}", "micro_batch", self.micro_batch, cause, self.recipe.train_data
        )
        smaller = dataclasses.replace(self.settings, micro_batch=size)
        if step > self.first_step:
            if self.saves is None:
                self.saves = self._saves_to(self.aside())
            self._save(behind=False)
        return _Again(smaller, self._checkpoint())

    # --- between steps (see `Conductor`) ------------------------------------------------------

    def before_update(self) -> None:
        factor = self.schedule(self.training.progress.applied)
        for group, rate in zip(self.engine.param_groups, self.base_rates, strict=True):
            group["lr"] = rate * factor

    def after_step(self, group: Group, result: StepResult) -> Then:
        step, settings = self.training.progress.step, self.settings
        if self.observers:
            self._emit(StepEnded(step))
        requests = self.training.agreed(result)
        if requests[Request.LOG] or step % settings.log_every == 0:
            self._log()
            self.training.window = Window(self.training.progress)
        if requests[Request.EVALUATE] or _due(step, settings.evaluate.every):
            self._evaluate()
        if self.saves is not None:
            self.requests.ask(self.saves.after_step(requests))
        if requests[Request.SAVE] or _due(step, settings.checkpoint.every):
            self._save(settings.checkpoint.behind)
        if requests[Request.PREEMPT]:
            return Then.PREEMPTED
        return Then.STOPPED if requests[Request.STOP] else Then.GO_ON

    def skipped(self, event: StepSkipped) -> None:
        self._emit(event)
        if event.in_a_row >= self.settings.max_nonfinite:
            if self.saves is not None:
                self.saves.finish()
            last = self._checkpoint()
            kept = f"the last checkpoint is {last}" if last else "none saved"
            raise NonFiniteTraining(
                f"step {event.step}: loss {event.loss}, gradient norm {event.grad_norm}: "
                f"{event.in_a_row} steps in a row could not be applied (max_nonfinite="
                f"{self.settings.max_nonfinite}); {kept}. The weights are those before these "
                "steps. Lower optimizer.lr, check the data, or raise precision"
            )

    # --- log, evaluate, save --------------------------------------------------------------

    def _log(self) -> None:
        self.training.settle()
        progress = self.training.progress
        position = progress.position
        figures = self.training.window.figures(progress, self.session)
        self.loss = figures["loss"]
        self._emit(
            Logged(
                step=progress.step,
                epoch=position.epoch + position.samples / (self.source.epoch_length or math.inf),
                learning_rate=float(self.engine.param_groups[0]["lr"]),
                items=progress.items,
                samples=progress.samples,
                skipped=progress.skipped,
                **figures,
            )
        )

    def _evaluate(self) -> None:
        if self.evaluated_at == self.training.progress.step:
            return
        for name, data in self.recipe.eval_data.items():
            started = time.perf_counter()
            metrics = self.metrics[name] = self._measured(name, data)
            seconds = time.perf_counter() - started
            self.training.window.leave_out(seconds)
            self._emit(Evaluated(self.training.progress.step, name, metrics, seconds))
        self.evaluated_at = self.training.progress.step

    def _measured(self, name: str, data: Any) -> dict[str, float]:
        while True:
            size = self.eval_micro_batch
            source = self._open(
                data,
                seed=0,
                global_batch=size * self.session.world.num_feeders,
                micro_batch=size,
                num_epochs=1,
            )
            try:
                return evaluate(self.session, self.engine, self.recipe, once(source))
            except Exception as error:
                if not ran_out(error):
                    raise
                cause = str(error)
            doing = f"the evaluation {name!r}"
            self.eval_micro_batch = self.memory.less(
                doing, "evaluate.micro_batch", size, cause, data
            )

    def _save(self, behind: bool) -> None:
        self.training.settle()
        if self.saves is not None:
            self.saves.save(self.training.progress.step, behind)

    def _what_to_save(self) -> dict[str, Any]:
        return {
            "step": self.training.progress.step,
            "engine": self.engine,
            "session": self.session,
            "state": {**self.training.state(), "metrics": self._metrics_now()},
            "settings": plain(self.settings),
            "driver": self.driver.name,
        }

    def _checkpoint(self) -> Place | None:
        """The newest that this run saved or resumed from."""
        return (self.saves and self.saves.newest) or self.resumed_from

    def _leave_out(self, seconds: float) -> None:
        self.training.window.leave_out(seconds)

    def _metrics_now(self) -> dict[str, float]:
        """`<set>.<metric>` as of this step; those of the first set by their bare names too."""
        if self.evaluated_at != self.training.progress.step:
            return {}
        named: dict[str, float] = {}
        for name, metrics in reversed(self.metrics.items()):
            named |= {f"{name}.{key}": value for key, value in metrics.items()}
        first = next(iter(self.metrics.values()), {})
        return {key: value for key, value in {**first, **named}.items() if math.isfinite(value)}

    def _emit(self, event: Event) -> None:
        for observer in self.observers:
            self.requests.ask(observer(event))


def _total_steps(settings: Settings, steps_per_epoch: int | None) -> int | None:
    """None: until the data ends."""
    if settings.steps is not None:
        return settings.steps
    if steps_per_epoch == 0:
        raise DataError("train_data holds no samples, or none that fill a global batch")
    if steps_per_epoch is not None:
        return math.ceil(settings.epochs * steps_per_epoch)
    if settings.epochs % 1:
        raise SettingError(
            f"epochs is {settings.epochs}, and the data has no length to take a part of: set "
            "whole epochs, or steps"
        )
    return None


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0

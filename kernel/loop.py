"""fit: the order of events, stopping and resuming."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .checkpoint import CheckpointReader, CheckpointStore, load_rng
from .contract import Batch, Driver, Engine, Outcome, Plan, Recipe, Session
from .cut import fitting_size, share
from .data import Group, Loader, eval_batches
from .errors import (
    DataError,
    NonFiniteTraining,
    RecipeError,
    SaveFailed,
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
    Saved,
    StepEnded,
    StepSkipped,
)
from .order import sequential, shuffled
from .progress import Progress, Window
from .registry import refuse_unpromised, usable_driver
from .requests import Requests
from .resume import CHECKPOINTS, agree, differences, find_checkpoint, plain
from .schedule import build_schedule
from .settings import Settings, override
from .step import Stepper

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
    checkpoint: Path | None
    """The newest that this run saved or resumed from."""
    finish: Any = None
    """What `finish` returned."""


def fit(
    recipe: Recipe,
    settings: Settings | None = None,
    *,
    backend: str = "auto",
    backend_options: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    observers: Sequence[Observer] = (),
    finish: Callable[[nn.Module], Any] | None = None,
) -> Result:
    """Train `recipe` as `settings` say on the driver called `backend`; every rank calls it.

    `out`: the run folder, where checkpoints go (`checkpoints/checkpoint-000100`); None saves
    nothing. `resume`: None starts anew; `auto` continues from the newest complete checkpoint in
    `out`, if there is one; a path is a checkpoint or a folder of them. `finish` is called at the
    end with the user's own module, whole and in evaluation mode, on every rank.

    Raises `UsageError` (something asked for cannot be had; nothing was started), `SaveFailed`,
    `WorkerFailed` and `CollectiveFailed`.
    """
    settings = settings or Settings()
    if recipe.train_data is None:
        raise RecipeError("the recipe has no train_data; give it a map-style data set")
    driver = usable_driver(backend)
    plan = settings.plan(override(driver.options_type(), backend_options or {}, "backend."))
    refuse_unpromised(driver, plan)
    requests = Requests()
    folder = Path(out) if out else None
    with requests.from_signals(), driver.open(plan) as session:

        def train() -> Result:
            run = _Run(driver, session, plan, recipe, settings, folder, observers, requests)
            if resume is not None:
                run.resume(resume)
            return run.go(finish)

        return train()  # a function, so that the model is let go before the session ends


class _Run:
    """One call of `fit` on one rank."""

    def __init__(
        self,
        driver: Driver,
        session: Session,
        plan: Plan,
        recipe: Recipe,
        settings: Settings,
        out: Path | None,
        observers: Sequence[Observer],
        requests: Requests,
    ) -> None:
        started = time.perf_counter()
        world = session.world
        self.driver, self.session, self.settings, self.out = driver, session, settings, out
        self.observers, self.requests, self.started = observers, requests, started
        self.recipe = dataclasses.replace(
            recipe, optimizer=recipe.optimizer or settings.optimizer.build
        )
        for name, data in recipe.eval_data.items():
            if len(data) == 0:
                raise DataError(f"evaluation data set {name!r} is empty; leave it out or fill it")
        able = driver.capabilities(plan)
        self.fixed_size = able.static_shapes
        largest = -(-settings.global_batch // world.num_feeders)
        self.micro_batch = plan.micro_batch or largest
        if self.fixed_size:
            self.micro_batch = fitting_size(largest, self.micro_batch)
        self.loader = Loader(
            recipe.train_data,
            collate=recipe.collate,
            seed=settings.seed,
            global_batch=settings.global_batch,
            micro_batch=self.micro_batch,
            feeder_index=world.feeder_index,
            num_feeders=world.num_feeders,
            order=shuffled if settings.data.shuffle else sequential,
            drop_last=settings.data.drop_last,
            fixed_size=self.fixed_size,
            workers=settings.data.workers,
            # what is fetched ahead must not draw from the generators that a checkpoint holds
            isolate_random=able.feeds_ahead or None,
        )
        self.total_steps = settings.steps or math.ceil(
            settings.epochs * self.loader.steps_per_epoch
        )
        agree(session, {**plain(settings), "(samples in train_data)": len(recipe.train_data)})
        self.engine: Engine = session.prepare(self.recipe)
        session.seed(settings.seed + 1 + world.rank)
        self.base_rates = [group["lr"] for group in self.engine.param_groups]
        self.schedule = build_schedule(
            total_steps=self.total_steps, **dataclasses.asdict(settings.schedule)
        )
        self.store = None
        if out is not None:
            keep = settings.checkpoint
            self.store = CheckpointStore(
                out / CHECKPOINTS,
                keep_last=keep.keep_last,
                keep_best=keep.keep_best,
                best_metric=keep.best_metric,
                best_mode=keep.best_mode,
                keep_every=keep.keep_every,
            )
        self.progress = Progress()
        self.window = Window(self.progress)
        self.first_step = 0
        self.checkpoint: Path | None = None
        self.metrics: dict[str, dict[str, float]] = {}
        self.loss = math.nan
        self.evaluated_at = self.saved_at = -1
        self.in_a_row = 0
        self.unsettled: tuple[Outcome, Tensor] | None = None

    def resume(self, source: str | Path) -> None:
        """Take the state of the newest complete checkpoint of `source`, or of that checkpoint."""
        path = find_checkpoint(self.session, source, self.out)
        if path is None:
            return
        reader, world = CheckpointReader(path), self.session.world
        manifest = reader.manifest
        progress = Progress.from_json(manifest.state) if manifest.state else Progress()
        self.engine.restore(reader)
        self.progress, self.first_step, self.checkpoint = progress, progress.step, path
        self.window = Window(progress)
        if window := manifest.state.get("window"):
            self.window.restore(window, self.session)
        self.saved_at = progress.step
        if metrics := manifest.state.get("metrics"):
            self.evaluated_at = progress.step
            self.metrics = {
                name: {
                    key.removeprefix(f"{name}."): value
                    for key, value in metrics.items()
                    if key.startswith(f"{name}.")
                }
                for name in self.recipe.eval_data
            }
        notes = differences(manifest, self.settings, self.driver.name, world.size)
        if not load_rng(reader, self.session):
            self.session.seed(self.settings.seed + 1 + world.rank + progress.step)
            notes += ("no random state for this rank in the checkpoint: seeded anew",)
        self._emit(Resumed(path, progress.step, notes))

    # --- the loop -------------------------------------------------------------------------

    def go(self, finish: Callable[[nn.Module], Any] | None) -> Result:
        self._emit(
            RunStarted(
                backend=self.driver.name,
                world=self.session.world,
                settings=self.settings,
                total_steps=self.total_steps,
                steps_per_epoch=self.loader.steps_per_epoch,
                num_samples=len(self.recipe.train_data),
                num_parameters=sum(p.numel() for p in self.engine.module.parameters()),
                first_step=self.first_step,
                out=self.out,
                flops_per_item=self.recipe.flops_per_item,
            )
        )
        reason = self._train()
        if self.window.has_grown(self.progress):
            self._log()  # and the window stays open: a longer run logs as if it had not ended here
        if reason != "preempted" and self.settings.evaluate.at_end:
            self._evaluate()
        if reason == "preempted" or self.settings.checkpoint.at_end:
            self._save()
        finished = None
        if finish is not None and reason != "preempted":
            with self.engine.full_params() as module:
                module.eval()
                finished = finish(module)
        step = self.progress.step
        self._emit(RunEnded(step, reason, time.perf_counter() - self.started))
        return Result(step, reason, self.loss, self.metrics, self.checkpoint, finished)

    def _train(self) -> str:
        progress, settings = self.progress, self.settings
        stepper = Stepper(self.recipe, self.engine, self.session)
        alone = self.session.world.size == 1
        remaining = max(0, self.total_steps - progress.step)
        groups = self.loader.groups(progress.position, remaining)
        entered: deque[tuple[Group, float]] = deque()
        microbatches = self._on_device(groups, entered)
        self.engine.module.train()
        with closing(groups):
            for first in microbatches:
                group, num_items = entered.popleft()
                result = stepper(
                    chain((first,), microbatches),
                    group.num_microbatches,
                    num_items,
                    self._set_learning_rate,
                    self.requests.send(),
                )
                progress.step += 1
                progress.position = group.next
                progress.samples += group.num_samples
                progress.items += int(result.items)
                self.unsettled = result.outcome, result.loss
                self.window.add(result.loss, result.outcome.grad_norm)
                if self.observers:
                    self._emit(StepEnded(progress.step))
                agreed = result.requests
                if alone:  # nobody to agree with: what came in during the step counts at once
                    agreed = [a + b for a, b in zip(agreed, self.requests.send(), strict=True)]
                if agreed[Request.LOG] or progress.step % settings.log_every == 0:
                    self._log()
                    self.window = Window(progress)
                if agreed[Request.EVALUATE] or _due(progress.step, settings.evaluate.every):
                    self._evaluate()
                if agreed[Request.SAVE] or _due(progress.step, settings.checkpoint.every):
                    self._save()
                if agreed[Request.PREEMPT]:
                    return "preempted"
                if agreed[Request.STOP]:
                    return "stopped"
        return "finished"

    def _on_device(
        self, groups: Iterator[Group], entered: deque[tuple[Group, float]]
    ) -> Iterator[tuple[Batch, float]]:
        """Every microbatch and what it weighs; `entered` tells of each group, and of this feeder's
        items in it, before its first.
        """
        world, count = self.session.world, self.recipe.count_items
        weights: deque[float] = deque()

        def on_host() -> Iterator[Batch]:
            for group in groups:
                microbatches = group.microbatches
                num_items: float
                num_items = share(group.num_samples, world.num_feeders, world.feeder_index)[1]
                if count is not None:
                    # the items of the whole group must be known before its first backward
                    fetched = list(microbatches)
                    num_items = sum(
                        count(part.batch) / part.repeats for part in fetched if part.num_samples
                    )
                    microbatches = iter(fetched)
                entered.append((group, num_items))
                for part in microbatches:
                    weights.append(1 / part.repeats if part.num_samples else 0.0)
                    yield part.batch

        for batch in self.session.feed(on_host()):
            yield batch, weights.popleft()

    def _set_learning_rate(self) -> None:
        self._settle()
        factor = self.schedule(self.progress.applied)
        for group, rate in zip(self.engine.param_groups, self.base_rates, strict=True):
            group["lr"] = rate * factor

    def _settle(self) -> None:
        """Learn whether the last update was applied, as late as possible: the next one is queued
        up to its own update by now.
        """
        if self.unsettled is None:
            return
        (outcome, loss), self.unsettled = self.unsettled, None
        progress = self.progress
        if outcome.applied():
            progress.applied += 1
            self.in_a_row = 0
            return
        progress.skipped += 1
        self.in_a_row += 1
        step = progress.applied + progress.skipped
        value = float(self.session.reduce(loss)) / self.session.world.num_feeders
        norm = float(outcome.grad_norm)
        self._emit(StepSkipped(step, self.in_a_row, value, norm))
        if self.in_a_row >= self.settings.max_nonfinite:
            kept = f"the last checkpoint is {self.checkpoint}" if self.checkpoint else "none saved"
            raise NonFiniteTraining(
                f"step {step}: loss {value}, gradient norm {norm}: {self.in_a_row} steps in a row "
                f"could not be applied (max_nonfinite={self.settings.max_nonfinite}); {kept}. The "
                "weights are those before these steps. Lower optimizer.lr, check the data, or "
                "raise precision"
            )

    # --- log, evaluate, save --------------------------------------------------------------

    def _log(self) -> None:
        self._settle()
        progress = self.progress
        figures = self.window.figures(progress, self.session)
        self.loss = figures["loss"]
        self._emit(
            Logged(
                step=progress.step,
                epoch=progress.position.epoch
                + progress.position.samples / len(self.recipe.train_data),
                learning_rate=float(self.engine.param_groups[0]["lr"]),
                items=progress.items,
                samples=progress.samples,
                skipped=progress.skipped,
                **figures,
            )
        )

    def _evaluate(self) -> None:
        if self.evaluated_at == self.progress.step:
            return
        world, settings = self.session.world, self.settings
        micro_batch = settings.evaluate.micro_batch or self.micro_batch
        for name, data in self.recipe.eval_data.items():
            started = time.perf_counter()
            batches = eval_batches(
                data,
                collate=self.recipe.collate,
                micro_batch=micro_batch,
                feeder_index=world.feeder_index,
                num_feeders=world.num_feeders,
                fixed_size=self.fixed_size,
                workers=settings.data.workers,
            )
            metrics = evaluate(self.session, self.engine, self.recipe, batches)
            self.metrics[name] = metrics
            seconds = time.perf_counter() - started
            self.window.leave_out(seconds)
            self._emit(Evaluated(self.progress.step, name, metrics, seconds))
        self.evaluated_at = self.progress.step

    def _save(self) -> None:
        self._settle()
        progress, started = self.progress, time.perf_counter()
        if self.store is None or self.saved_at == progress.step:
            return
        try:
            path = self.store.save(
                progress.step,
                self.engine,
                self.session,
                driver=self.driver.name,
                state={
                    **progress.to_json(),
                    "metrics": self._metrics_now(),
                    "window": self.window.to_json(self.session),
                },
                settings=plain(self.settings),
            )
        except SaveFailed as error:
            if self.settings.checkpoint.stop_on_error:
                raise
            path = self.store.root
            self._emit(Saved(progress.step, path, time.perf_counter() - started, str(error)))
            return
        self.checkpoint, self.saved_at = path, progress.step
        seconds = time.perf_counter() - started
        self.window.leave_out(seconds)
        self._emit(Saved(progress.step, path, seconds))

    def _metrics_now(self) -> dict[str, float]:
        """`<set>.<metric>` as of this step; those of the first set by their bare names too."""
        if self.evaluated_at != self.progress.step:
            return {}
        named: dict[str, float] = {}
        for name, metrics in reversed(self.metrics.items()):
            named |= {f"{name}.{key}": value for key, value in metrics.items()}
        first = next(iter(self.metrics.values()), {})
        return {key: value for key, value in {**first, **named}.items() if math.isfinite(value)}

    def _emit(self, event: Event) -> None:
        for observer in self.observers:
            self.requests.ask(observer(event))


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0

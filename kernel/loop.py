"""fit: the order of events, stopping and resuming."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .checkpoint import CheckpointReader, CheckpointStore, load_rng, newest
from .contract import Batch, Driver, Engine, Outcome, Plan, Recipe, Session
from .cut import share
from .data import Group, Loader, Position, eval_batches
from .errors import (
    CapabilityRefused,
    CheckpointNotFound,
    CollectiveFailed,
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
from .registry import usable_driver
from .requests import Requests
from .schedule import build_schedule
from .settings import Settings, flatten, override
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
    refuse_what_is_not_promised(driver, plan)
    requests = Requests()
    with requests.from_signals(), driver.open(plan) as session:
        run = _Run(
            driver, session, plan, recipe, settings, Path(out) if out else None, observers, requests
        )
        if resume is not None:
            run.resume(resume)
        return run.go(finish)


def refuse_what_is_not_promised(driver: Driver, plan: Plan) -> None:
    """Raises `CapabilityRefused` for the first thing in the plan that the driver cannot do."""
    able = driver.capabilities(plan)
    precision = plan.precision.name
    for asked, promised, capability, remedy in (
        (
            True,
            precision in able.precisions,
            f"precision {precision}",
            f"it trains in {', '.join(sorted(able.precisions))}",
        ),
        (plan.compile, able.compile, "compile", "set compile=false"),
        (
            plan.activation_checkpointing,
            able.activation_checkpointing,
            "activation_checkpointing",
            "leave it empty",
        ),
        (
            int(os.environ.get("WORLD_SIZE", "1")) > 1,
            able.multi_process,
            "more than one process",
            "launch one process, or choose another backend",
        ),
    ):
        if asked and not promised:
            raise CapabilityRefused(capability, driver.name, remedy)


@dataclass
class _Progress:
    """Where the run is; what a checkpoint holds besides tensors."""

    step: int = 0
    applied: int = 0
    skipped: int = 0
    items: int = 0
    samples: int = 0
    position: Position = field(default_factory=lambda: Position(0, 0))


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
        self.micro_batch = plan.micro_batch or -(-settings.global_batch // world.num_feeders)
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
            workers=settings.data.workers,
            # what is fetched ahead must not draw from the generators that a checkpoint holds
            isolate_random=driver.capabilities(plan).feeds_ahead or None,
        )
        self.num_samples = len(recipe.train_data)
        self.total_steps = settings.steps or math.ceil(
            settings.epochs * self.loader.steps_per_epoch
        )
        self._agree_on_configuration()
        self.engine: Engine = session.prepare(self.recipe)
        session.seed(settings.seed + 1 + world.rank)
        self.base_rates = [group["lr"] for group in self.engine.param_groups]
        self.schedule = build_schedule(
            total_steps=self.total_steps, **dataclasses.asdict(settings.schedule)
        )
        keep = settings.checkpoint
        self.store = out and CheckpointStore(
            out / "checkpoints",
            keep_last=keep.keep_last,
            keep_best=keep.keep_best,
            best_metric=keep.best_metric,
            best_mode=keep.best_mode,
            keep_every=keep.keep_every,
        )
        self.progress = _Progress()
        self.first_step = 0
        self.checkpoint: Path | None = None
        self.metrics: dict[str, dict[str, float]] = {}
        self.loss = math.nan
        self.evaluated_at = self.saved_at = -1
        self.in_a_row = 0
        self.unsettled: tuple[Outcome, Tensor] | None = None
        self.window_loss: Any = 0.0
        self.grad_norm: Any = math.nan
        self._open_window()

    # --- before the first step ------------------------------------------------------------

    def _agree_on_configuration(self) -> None:
        mine = {key: str(value) for key, value in flatten(self.settings).items()}
        mine["(samples in train_data)"] = str(self.num_samples)
        for rank, theirs in enumerate(self.session.exchange(mine)):
            differing = [key for key in mine if mine[key] != theirs.get(key)]
            if differing:
                shown = ", ".join(f"{k}: {mine[k]} here, {theirs.get(k)} there" for k in differing)
                raise CollectiveFailed(
                    f"rank {self.session.world.rank} and rank {rank} were started with different "
                    f"configurations: {shown}. Start every rank with the same command"
                )

    def resume(self, source: str | Path) -> None:
        """Take the state of the newest complete checkpoint of `source`, or of that checkpoint."""
        path = self._find_checkpoint(source)
        if path is None:
            return
        reader = CheckpointReader(path)
        self.engine.restore(reader)
        manifest = reader.manifest
        state = dict(manifest.state)
        metrics = state.pop("metrics", {})
        position = Position.from_json(state.pop("position"))
        self.progress = _Progress(**state, position=position)
        self.first_step, self.checkpoint = self.progress.step, path
        self.saved_at = self.first_step
        self.evaluated_at = self.first_step if metrics else -1
        notes = [
            f"{name} was {there}, is {here}"
            for name, there, here in (
                ("backend", manifest.driver, self.driver.name),
                ("world size", manifest.world_size, self.session.world.size),
                *(
                    (key, manifest.settings.get(key), value)
                    for key, value in _plain(self.settings).items()
                ),
            )
            if there != here
        ]
        if not load_rng(reader, self.session):
            self.session.seed(self.settings.seed + 1 + self.session.world.rank + self.first_step)
            notes.append("no random state for this rank in the checkpoint: seeded anew")
        self._emit(Resumed(path, self.first_step, tuple(notes)))

    def _find_checkpoint(self, source: str | Path) -> Path | None:
        automatic = source == "auto"
        if automatic and self.out is None:
            raise CheckpointNotFound("resume is 'auto' and there is no run folder to look in")
        folder = self.out / "checkpoints" if automatic and self.out else Path(source)
        found: str | None = None
        if self.session.world.rank == 0:
            if not automatic and (folder / "manifest.json").is_file():
                found = str(folder)
            else:
                nested = folder / "checkpoints"
                path = newest(nested if nested.is_dir() else folder)
                found = None if path is None else str(path)
        found = self.session.exchange(found)[0]
        if found is None and not automatic:
            raise CheckpointNotFound(
                f"no complete checkpoint in {folder}; give a checkpoint folder (it holds "
                "manifest.json) or a run folder"
            )
        return None if found is None else Path(found)

    # --- the loop -------------------------------------------------------------------------

    def go(self, finish: Callable[[nn.Module], Any] | None) -> Result:
        self._emit(
            RunStarted(
                backend=self.driver.name,
                world=self.session.world,
                settings=self.settings,
                total_steps=self.total_steps,
                steps_per_epoch=self.loader.steps_per_epoch,
                num_samples=self.num_samples,
                num_parameters=sum(p.numel() for p in self.engine.module.parameters()),
                first_step=self.first_step,
                out=self.out,
                flops_per_item=self.recipe.flops_per_item,
            )
        )
        reason = self._train()
        self._settle()
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
        groups = self.loader.groups(progress.position, self.total_steps - progress.step)
        entered: deque[tuple[Group, float]] = deque()
        microbatches = self._on_device(groups, entered)
        self.engine.module.train()
        self._open_window()
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
                self.window_loss = self.window_loss + result.loss
                self.grad_norm = result.outcome.grad_norm
                if self.observers:
                    self._emit(StepEnded(progress.step))
                agreed = result.requests
                if alone:  # nobody to agree with: what came in during the step counts at once
                    agreed = [a + b for a, b in zip(agreed, self.requests.send(), strict=True)]
                if agreed[Request.LOG] or progress.step % settings.log_every == 0:
                    self._log()
                if agreed[Request.EVALUATE] or _due(progress.step, settings.evaluate.every):
                    self._evaluate()
                if agreed[Request.SAVE] or _due(progress.step, settings.checkpoint.every):
                    self._save()
                if agreed[Request.PREEMPT]:
                    return "preempted"
                if agreed[Request.STOP]:
                    return "stopped"
        if progress.step > self.window_step:
            self._log()
        return "finished"

    def _on_device(
        self, groups: Iterator[Group], entered: deque[tuple[Group, float]]
    ) -> Iterator[tuple[Batch, int]]:
        """Every microbatch with its number of samples; `entered` tells of each group, and of this
        feeder's items in it, before its first.
        """
        world, count = self.session.world, self.recipe.count_items
        sizes: deque[int] = deque()

        def on_host() -> Iterator[Batch]:
            for group in groups:
                microbatches = group.microbatches
                num_items = share(group.num_samples, world.num_feeders, world.feeder_index)[1]
                if count is not None:
                    # the items of the whole group must be known before its first backward
                    fetched = list(microbatches)
                    num_items = sum(count(batch) for batch, samples, _ in fetched if samples)
                    microbatches = iter(fetched)
                entered.append((group, num_items))
                for batch, num_samples, _ in microbatches:
                    sizes.append(num_samples)
                    yield batch

        for batch in self.session.feed(on_host()):
            yield batch, sizes.popleft()

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
        value, norm = float(self.session.reduce(loss)), float(outcome.grad_norm)
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

    def _open_window(self) -> None:
        self.window_step, self.window_time = self.progress.step, time.perf_counter()
        self.window_items, self.window_samples = self.progress.items, self.progress.samples
        self.window_loss = 0.0

    def _log(self) -> None:
        self._settle()
        progress = self.progress
        steps = progress.step - self.window_step
        self.loss = float(self.session.reduce(self.window_loss)) / steps
        norm = float(self.grad_norm)  # waits for the device: the clock is read after it
        seconds = time.perf_counter() - self.window_time
        self._emit(
            Logged(
                step=progress.step,
                epoch=progress.position.epoch + progress.position.samples / self.num_samples,
                loss=self.loss,
                grad_norm=norm,
                learning_rate=float(self.engine.param_groups[0]["lr"]),
                items=progress.items,
                samples=progress.samples,
                skipped=progress.skipped,
                step_seconds=seconds / steps,
                items_per_second=(progress.items - self.window_items) / seconds,
                samples_per_second=(progress.samples - self.window_samples) / seconds,
            )
        )
        self._open_window()

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
                workers=settings.data.workers,
            )
            metrics = evaluate(self.session, self.engine, self.recipe, batches)
            self.metrics[name] = metrics
            seconds = time.perf_counter() - started
            self.window_time += seconds  # the training rate does not count evaluation
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
                state={**dataclasses.asdict(progress), "metrics": self._metrics_now()},
                settings=_plain(self.settings),
            )
        except SaveFailed as error:
            if self.settings.checkpoint.stop_on_error:
                raise
            path = self.store.root
            self._emit(Saved(progress.step, path, time.perf_counter() - started, str(error)))
            return
        self.checkpoint, self.saved_at = path, progress.step
        seconds = time.perf_counter() - started
        self.window_time += seconds
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


def _plain(settings: Settings) -> dict[str, Any]:
    """Settings as JSON holds them, so that what was stored compares equal."""
    flat = flatten(settings)
    return {key: list(v) if isinstance(v, tuple) else v for key, v in flat.items()}

"""One run on one rank: what happens between steps, as the settings say."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoint import (
    CHECKPOINTS,
    CheckpointReader,
    Manifest,
    own_random_state,
    storage_of,
)
from ..data.open_dataset import open_dataset
from ..data.partition import fitting_size
from ..kernel import events
from ..kernel.batches import ENDLESS, Group, Groups
from ..kernel.contract import Driver, Session
from ..kernel.errors import (
    OutOfMemory,
    ran_out,
)
from ..kernel.loop import NextAction, TrainLoop
from ..kernel.paths import Place, Url
from ..kernel.plan import Plan
from ..kernel.progress import Window
from ..kernel.recipe import Recipe
from ..kernel.step import StepResult
from .evaluations import Evaluations
from .late_ranks import hear_of_late_ranks
from .notes import log_of, never_finite, unused_note
from .optimizer_record import OptimizerRecord
from .out_of_memory import OutOfMemoryPolicy
from .planned_steps import Planned
from .result import Result, RetryWithSmallerBatch
from .resume import differences, find_checkpoint
from .run_lock import RunLock
from .saves import Saves, checkpoint_store, stored_metrics
from .schedule import Schedule, build_schedule
from .settings import Settings
from .spikes import SkipGroups, Spikes
from .start_checks import agree, json_types, on_rank_0, start_conditions

__all__ = ["Run"]


class Run:
    """One call of `fit` on one rank."""

    def __init__(
        self,
        driver: Driver,
        session: Session,
        plan: Plan,
        recipe: Recipe,
        settings: Settings,
        lock: RunLock | None,
        observers: Sequence[events.Observer],
        requests: events.Requests,
        aside: Callable[[], Path],
    ) -> None:
        started = time.perf_counter()
        world = session.world
        self.lock, self.out = lock, (out := None if lock is None else lock.folder)
        self.driver, self.session, self.settings = driver, session, settings
        self.observers, self.requests, self.started = observers, requests, started
        self._telling = threading.RLock()
        self.aside = aside
        """Makes a folder that lasts until `fit` returns."""
        self.own_optimizer = recipe.optimizer is not None
        self.optimizer = OptimizerRecord(
            recipe.optimizer or settings.optimizer.build, saved=out is not None
        )
        self.recipe = dataclasses.replace(recipe, optimizer=self.optimizer)
        agree(session, start_conditions(driver, plan, recipe, settings))
        if lock is not None:
            on_rank_0(session, lambda: storage_of(lock.folder).check(lock.folder))
            lock.take(session, lambda note: self._emit(events.Warned(note)))
        able = driver.capabilities(plan)
        if world.size > 1:
            hear_of_late_ranks(session, driver.name, able, self._emit, self._steps_done)
        largest = -(-settings.global_batch // world.num_feeders)
        self.micro_batch = plan.micro_batch or largest
        if able.static_shapes:
            self.micro_batch = fitting_size(largest, self.micro_batch)
        self.memory = OutOfMemoryPolicy(settings, world, out, able.saves_memory, self._emit)
        open_data = partial(
            open_dataset,
            session=session,
            collate=recipe.collate,
            count_items=recipe.count_items,
            fixed_size=able.static_shapes,
            workers=settings.data.workers,
        )
        self.source = open_data(
            recipe.train_data,
            seed=settings.seed,
            global_batch=settings.global_batch,
            micro_batch=self.micro_batch,
            num_epochs=None if settings.steps else math.ceil(settings.epochs),
            shuffle=settings.data.shuffle,
            by_length=settings.data.by_length,
            lengths=self.recipe.lengths,
            drop_last=settings.data.drop_last,
            # what is fetched ahead must not draw from the generators that a checkpoint holds
            isolate_random=able.feeds_ahead or None,
        )
        self.planned = Planned(settings, self.source)
        self.engine = self.memory.prepare(session, self.recipe)
        session.seed(settings.seed + 1 + world.rank)
        self.base_rates = [group["lr"] for group in self.engine.param_groups]
        self.schedule = self._schedule()
        self.saves = None if out is None else self._saves_to(out / CHECKPOINTS)
        self.spikes = Spikes(settings.spikes, session, self.source.where)
        data: Groups = self.source
        if settings.spikes.roll_back:
            data = SkipGroups(self.source, self.spikes.left_out)
        self.training = TrainLoop(
            self.recipe, session, self.engine, data, self.planned.total, self, requests
        )
        self.first_step = 0
        self.loss = math.nan
        size = settings.evaluate.micro_batch or self.micro_batch
        self.evaluations = Evaluations(
            session, self.engine, self.recipe, open_data, size, self.memory, self._emit
        )
        self.resumed_from: Place | None = None
        self.unused_told = False

    def _schedule(self) -> Schedule:
        settings = dataclasses.asdict(self.settings.schedule)
        return build_schedule(total_steps=self.planned.total, **settings)

    def _saves_to(self, folder: Place) -> Saves:
        guard = None if self.lock is None else self.lock.check_now
        store = checkpoint_store(folder, self.settings.checkpoint, guard)
        stops = self.settings.checkpoint.stop_on_error
        return Saves(store, self._what_to_save, self._emit, self._leave_out, stops)

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
                self._emit(events.Warned(note))
            return
        manifest, notes = self._restore(path)
        step = self.training.progress.step
        self.first_step, self.resumed_from = step, path
        self.evaluations.restore(stored_metrics(manifest.state, str(path)), step)
        changed = differences(manifest, self.settings, self.driver.name, self.session.world.size)
        self._emit(events.Resumed(path, step, (*left_out, *changed, *notes)))

    def _restore(self, path: Place) -> tuple[Manifest, tuple[str, ...]]:
        """Take over that checkpoint; what it could not give, in words."""
        reader = CheckpointReader(path)
        where = str(path)
        state = reader.manifest.loop_state(where)
        stored_metrics(state, where)  # may raise, while nothing is changed
        keep = self.settings.resume.optimizer == "keep"
        reader, notes = self.optimizer.taken_from(reader, self.own_optimizer, keep)
        notes += self._go_on_with_data(state, where)
        self.spikes.restore(state.get("spikes"), where)
        with own_random_state(reader, self.session, self.driver.name) as unknown:
            self.training.restore(reader, state, where)
        step = self.training.progress.step
        if self.saves is not None:
            self.saves.is_saved(step)
        if unknown:
            if len(unknown) == len(self.session.rng_state()):
                self.session.seed(self.settings.seed + 1 + self.session.world.rank + step)
            names = ", ".join(unknown)
            notes += (f"no random state for this rank in the checkpoint: seeded anew ({names})",)
        return reader.manifest, notes

    def _go_on_with_data(self, state: Mapping[str, Any], where: str) -> tuple[str, ...]:
        """The order of the begun epoch, the number of steps and the schedule; what changed."""
        notes = self.planned.resume(state, where)
        self.training.total_steps = ENDLESS if self.planned.total is None else self.planned.total
        self.schedule = self._schedule()
        return notes

    # --- the loop -------------------------------------------------------------------------

    def go(self, finish: Callable[[nn.Module], Any] | None) -> Result | RetryWithSmallerBatch:
        """To the end, or to where memory runs out."""
        self._emit(
            events.RunStarted(
                backend=self.driver.name,
                world=self.session.world,
                settings=self.settings,
                total_steps=self.planned.total,
                steps_per_epoch=self.source.steps_per_epoch,
                num_samples=self.source.num_samples,
                num_parameters=self.engine.num_parameters,
                first_step=self.first_step,
                out=self.out,
                flops_per_item=self.recipe.flops_per_item,
            )
        )
        then = self._train()
        if isinstance(then, RetryWithSmallerBatch):
            return then
        done = self.training.progress.step
        if then is NextAction.FINISHED and self.settings.steps and done < self.settings.steps:
            self._emit(events.Warned(f"the data ended after {done} of {self.settings.steps} steps"))
        if self.training.window.has_grown(self.training.progress):
            self._log()  # and the window stays open: a longer run logs as if it had not ended here
        self._tell_spikes()
        preempted = then is NextAction.PREEMPTED
        if not preempted and self.settings.evaluate.at_end:
            self._leave_out(self.evaluations.run(self.training.progress.step))
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
        self._emit(events.RunEnded(step, reason, time.perf_counter() - self.started))
        error = "" if self.saves is None else self.saves.error
        return Result(
            step, reason, self.loss, self.evaluations.metrics, self._checkpoint(), finished, error
        )

    def _train(self) -> NextAction | RetryWithSmallerBatch:
        if any(self.session.exchange(self.requests.is_asked(events.Request.PREEMPT))):
            # a signal came while all was built: no step, that may compile
            return NextAction.PREEMPTED
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
        return RetryWithSmallerBatch(smaller, self._checkpoint())

    # --- between steps (see `LoopPolicy`) ------------------------------------------------------

    def before_update(self) -> None:
        if not self.unused_told:
            self.unused_told = True
            if unused := self.engine.unused():
                self._emit(events.Warned(unused_note(unused)))
        factor = self.schedule(self.training.progress.applied)
        for group, rate in zip(self.engine.param_groups, self.base_rates, strict=True):
            group["lr"] = rate * factor

    def after_step(self, group: Group, result: StepResult) -> NextAction:
        step, settings = self.training.progress.step, self.settings
        if self.lock is not None:
            self.lock.check()
        if self.observers:
            self._emit(events.StepEnded(step))
        if self.spikes.watches:
            self.spikes.add(step, group, result.loss)
        requests = self.training.agreed(result)
        log = requests[events.Request.LOG] or step % settings.log_every == 0
        save = requests[events.Request.SAVE] or _due(step, settings.checkpoint.every)
        rolled_back = (log or save) and self._tell_spikes() and self._roll_back()
        if not rolled_back:
            if log:
                self._log()
                self.training.window = Window(self.training.progress)
            if requests[events.Request.EVALUATE] or _due(step, settings.evaluate.every):
                self._leave_out(self.evaluations.run(step))
            if self.saves is not None:
                self.requests.ask(self.saves.after_step(requests))
            if save:
                self._save(settings.checkpoint.behind)
        if requests[events.Request.PREEMPT]:
            return NextAction.PREEMPTED
        if requests[events.Request.STOP]:
            return NextAction.STOPPED
        return NextAction.ROLLED_BACK if rolled_back else NextAction.GO_ON

    def _tell_spikes(self) -> bool:
        """Whether there were any since the last look."""
        found = self.spikes.find()
        for spike in found:
            self._emit(spike)
        return bool(found)

    def _roll_back(self) -> bool:
        """Go back to the newest checkpoint, if that is wanted and there is one."""
        spikes, settings = self.spikes, self.settings.spikes
        if not settings.roll_back:
            return False
        if self.saves is not None:
            self.saves.finish()
        path = self._checkpoint()
        if path is None:
            self._emit(
                events.Warned("there is no checkpoint to roll back to: training goes on. Save some")
            )
            return False
        if spikes.roll_backs == settings.max_roll_backs:
            raise spikes.diverged(path)
        spikes.roll_backs += 1
        self._restore(path)
        step = self.training.progress.step
        self._emit(events.RolledBack(step, path, len(spikes.left_out)))
        return True

    def skipped(self, event: events.StepSkipped, group: Group) -> None:
        samples = self.source.where(group.position, group.num_samples)
        self._emit(dataclasses.replace(event, samples=samples))
        if event.in_a_row >= self.settings.max_nonfinite:
            if self.saves is not None:
                self.saves.finish()
            last = self._checkpoint()
            raise never_finite(event, samples, self.settings.max_nonfinite, last)

    # --- log, evaluate, save --------------------------------------------------------------

    def _log(self) -> None:
        self.training.resolve_pending_outcome()
        logged = log_of(self.training, self.source)
        self.loss = logged.loss
        self._emit(logged)

    def _save(self, behind: bool) -> None:
        self.training.resolve_pending_outcome()
        if self.saves is not None:
            self.saves.save(self.training.progress.step, behind)

    def _what_to_save(self) -> dict[str, Any]:
        self.optimizer.refuse_unsaved()
        return {
            "step": self.training.progress.step,
            "engine": self.engine,
            "session": self.session,
            "state": {
                **self.training.state(),
                "begun": self.source.begun(self.training.progress.position),
                "planned": self.planned.to_json(),
                "metrics": self.evaluations.to_json(self.training.progress.step),
                "optimizer": self.optimizer.noted,
                **({"spikes": self.spikes.to_json()} if self.spikes.watches else {}),
            },
            "settings": json_types(self.settings),
            "driver": self.driver.name,
        }

    def _checkpoint(self) -> Place | None:
        """The newest that this run saved or resumed from."""
        return (self.saves and self.saves.newest) or self.resumed_from

    def _steps_done(self) -> int:
        loop: TrainLoop | None = vars(self).get("training")  # it may not have been made yet
        return loop.progress.step if loop is not None else 0

    def _leave_out(self, seconds: float) -> None:
        self.training.window.leave_out(seconds)

    def _emit(self, event: events.Event) -> None:
        with self._telling:  # of late ranks another thread tells
            for observer in self.observers:
                self.requests.ask(observer(event))


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0

"""One run on one rank: made ready, resumed, and brought to its end."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoint import CHECKPOINTS, storage_of
from ..data.open_dataset import open_dataset
from ..data.partition import fitting_size
from ..kernel import events
from ..kernel.batches import Groups
from ..kernel.contract import Driver, Session
from ..kernel.errors import OutOfMemory, ran_out
from ..kernel.loop import NextAction, TrainLoop
from ..kernel.paths import Place, Url
from ..kernel.plan import Plan
from ..kernel.recipe import Recipe
from .announce import Announcer
from .evaluations import Evaluations
from .late_ranks import hear_of_late_ranks
from .optimizer_record import OptimizerRecord
from .out_of_memory import OutOfMemoryPolicy
from .planned_steps import Planned
from .policy import SettingsPolicy
from .result import Result, RetryWithSmallerBatch
from .resume import differences, find_checkpoint
from .run_lock import RunLock
from .run_state import RunState
from .saves import Saves, checkpoint_store, stored_metrics
from .settings import Settings
from .spikes import SkipGroups, Spikes
from .start_checks import agree, on_rank_0, start_conditions
from .turn_losses import TurnLosses
from .weight_averages import WeightAverages

__all__ = ["Run"]


class Run:
    """One call of `fit` on one rank. `aside()` makes a folder that lasts until `fit` returns."""

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
        self.started = time.perf_counter()
        world = session.world
        self.lock, self.out = lock, (out := None if lock is None else lock.folder)
        self.driver, self.session, self.settings, self.aside = driver, session, settings, aside
        self.announce = announce = Announcer(observers, requests)
        optimizer = OptimizerRecord(
            recipe.optimizer or settings.optimizer.build,
            of_recipe=recipe.optimizer is not None,
            saved=out is not None,
        )
        self.recipe = dataclasses.replace(recipe, optimizer=optimizer)
        agree(session, start_conditions(driver, plan, recipe, settings))
        if lock is not None:
            on_rank_0(session, lambda: storage_of(lock.folder).check(lock.folder))
            lock.take(session, lambda note: announce(events.Warned(note)))
        able = driver.capabilities(plan)
        if world.size > 1:
            hear_of_late_ranks(session, driver.name, able, announce, self._steps_done)
        largest = -(-settings.global_batch // world.num_readers)
        self.micro_batch = plan.micro_batch or largest
        if able.static_shapes:
            self.micro_batch = fitting_size(largest, self.micro_batch)
        self.memory = OutOfMemoryPolicy(settings, world, out, able.saves_memory, announce)
        open_data = partial(
            open_dataset,
            session=session,
            collate=recipe.collate,
            count_items=recipe.count_items,
            fixed_size=able.static_shapes,
            workers=settings.data.workers,
        )
        source = open_data(
            recipe.train_data,
            seed=settings.seed,
            global_batch=settings.global_batch,
            micro_batch=self.micro_batch,
            num_epochs=None if settings.steps else math.ceil(settings.epochs),
            shuffle=settings.data.shuffle,
            by_length=settings.data.by_length,
            lengths=recipe.lengths,
            drop_last=settings.data.drop_last,
            # what is fetched ahead must not draw from the generators that a checkpoint holds
            isolate_random=able.feeds_ahead or None,
        )
        planned = Planned(settings, source, recipe.schedule)
        engine = self.memory.prepare(session, self.recipe)
        session.seed(settings.seed + 1 + world.feeder_index)
        turn_of = getattr(recipe.loss, "name_of_update", None)
        spikes = Spikes(settings.spikes, session, source.where, turn_of)
        size = settings.evaluate.micro_batch or self.micro_batch
        averages = WeightAverages(settings, engine, driver.name)
        self.state = RunState(
            backend=driver.name,
            session=session,
            settings=settings,
            source=source,
            planned=planned,
            optimizer=optimizer,
            evaluations=Evaluations(
                *(session, engine, self.recipe, open_data, size, self.memory, announce),
                with_weights=averages.evaluated,
            ),
            spikes=spikes,
            turn_losses=TurnLosses(turn_of, session),
            averages=averages,
        )
        saves = None if out is None else self._saves_to(out / CHECKPOINTS)
        self.policy = SettingsPolicy(self.state, engine.param_groups, saves, lock, announce)
        data: Groups = SkipGroups(source, spikes.left_out) if settings.spikes.roll_back else source
        self.loop = TrainLoop(
            self.recipe, session, engine, data, planned.total, self.policy, requests
        )
        self.first_step = 0

    def _saves_to(self, folder: Place) -> Saves:
        guard = None if self.lock is None else self.lock.check_now
        store = checkpoint_store(folder, self.settings.checkpoint, guard)
        return Saves(store, self.announce, self.settings.checkpoint.stop_on_error)

    def _steps_done(self) -> int:
        """Asked by another thread, while the loop may not have been made yet."""
        loop: TrainLoop | None = getattr(self, "loop", None)
        return loop.progress.step if loop is not None else 0

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
                self.announce(events.Warned(note))
            return
        manifest, notes = self.policy.restore(self.loop, path)
        self.first_step, self.policy.resumed_from = self.loop.progress.step, path
        metrics = stored_metrics(manifest.state, str(path))
        self.state.evaluations.restore(metrics, self.first_step)
        changed = differences(manifest, self.settings, self.driver.name, self.session.world.size)
        self.announce(events.Resumed(path, self.first_step, (*left_out, *changed, *notes)))

    def go(self, finish: Callable[[nn.Module], Any] | None) -> Result | RetryWithSmallerBatch:
        """To the end, or to where memory runs out."""
        source, loop, policy = self.state.source, self.loop, self.policy
        self.announce(
            events.RunStarted(
                backend=self.driver.name,
                world=self.session.world,
                settings=self.settings,
                total_steps=self.state.planned.total,
                steps_per_epoch=source.steps_per_epoch,
                num_samples=source.num_samples,
                num_parameters=loop.engine.num_parameters,
                first_step=self.first_step,
                out=self.out,
                flops_per_item=self.recipe.flops_per_item,
            )
        )
        then = self._train()
        if isinstance(then, RetryWithSmallerBatch):
            return then
        step, steps = loop.progress.step, self.settings.steps
        if then is NextAction.FINISHED and steps and step < steps:
            self.announce(events.Warned(f"the data ended after {step} of {steps} steps"))
        policy.finish(loop, preempted=then is NextAction.PREEMPTED)
        finished = None
        if finish is not None and then is not NextAction.PREEMPTED:
            with loop.engine.full_params() as module:
                module.eval()
                finished = finish(module)
        self.announce(events.RunEnded(step, then.value, time.perf_counter() - self.started))
        return Result(
            step,
            then.value,
            policy.loss,
            self.state.evaluations.metrics,
            policy.checkpoint,
            finished,
            "" if policy.saves is None else policy.saves.error,
        )

    def _train(self) -> NextAction | RetryWithSmallerBatch:
        preempted = self.announce.requests.is_asked(events.Request.PREEMPT)
        if any(self.session.exchange(preempted)):
            # a signal came while all was built: no step, that may compile
            return NextAction.PREEMPTED
        try:
            return self.loop.run()
        except OutOfMemory as error:
            raise OutOfMemory(f"{error}; {self.memory.advice()}") from error
        except Exception as error:
            if not ran_out(error):
                raise
            cause = str(error)
        # here, where nothing holds what the failed step held
        step, policy = self.loop.progress.step, self.policy
        size = self.memory.less(
            f"step {step + 1}", "micro_batch", self.micro_batch, cause, self.recipe.train_data
        )
        smaller = dataclasses.replace(self.settings, micro_batch=size)
        if step > self.first_step:
            if policy.saves is None:
                policy.saves = self._saves_to(self.aside())
            policy.save(self.loop, in_background=False)
        return RetryWithSmallerBatch(smaller, policy.checkpoint)

"""One run on one rank: prepared, resumed and trained to its end."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import lost_ranks
from ..checkpoint import CHECKPOINTS, storage_of
from ..checkpoint.catalog import tidy
from ..data.open_dataset import open_dataset
from ..data.partition import fitting_size
from ..kernel import events
from ..kernel.batches import Groups
from ..kernel.contract import Driver, Session
from ..kernel.errors import OutOfMemory, SettingError, ran_out
from ..kernel.loop import NextAction, TrainLoop
from ..kernel.optional import KeepsWrites, TakesOverStep
from ..kernel.paths import Place, Url
from ..kernel.plan import Plan
from ..kernel.recipe import Recipe
from .after_update import AfterUpdate
from .announce import Announcer
from .digests import Digester
from .early_stopping import EarlyStopping
from .ending import Ending, sentences
from .evaluations import Evaluations
from .gc_frozen import survivors_frozen
from .given_back import GivenModel
from .late_ranks import abort_ranks, ended_by, report_late_ranks
from .left_out import LeftOut
from .loss_parts import LossParts, with_parts
from .memory_account import MemoryAccount
from .module_state import ModuleState
from .nonfinite import NonFiniteSearch, rerun_of
from .observer_states import ObserverStates
from .optimizer_record import OptimizerRecord
from .out_of_memory import OutOfMemoryPolicy
from .planned_steps import Planned
from .plateau import Plateau
from .policy import SettingsPolicy
from .read_ahead import ReadAhead
from .result import Result, RetryWithSmallerBatch
from .resume import differences, find_checkpoint
from .run_lock import RunLock
from .run_state import RunState
from .sanity import SanityCheck, skipped_without_memory
from .saves import Saves, checkpoint_store, stored_metrics
from .settings import Settings
from .shown_updates import shared
from .spikes import SkipGroups, Spikes
from .start_checks import agree, on_rank_0, start_conditions
from .start_notes import start_notes
from .statistics import Statistics
from .step_clock import DATA, OBSERVERS, StepClock
from .time_accounting import TimeAccounting
from .turn_losses import TurnLosses
from .update_numbers import numbering
from .weight_averages import WeightAverages

__all__ = ["Run"]


class Run:
    """One call of `fit` on one rank. `aside()` makes a temporary folder that exists until `fit`
    returns."""

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
        clock = StepClock()
        clock.watch(session)
        self.announce = announce = Announcer(observers, requests, clock)
        stop = settings.stop
        if stop.metric is not None:
            more = EarlyStopping(stop.metric, stop.patience, stop.mode, stop.min_change)
            more.report = lambda words: announce(events.Warned(words))
            announce.observers = [*announce.observers, more]
        plateau = Plateau(settings.schedule) if settings.schedule.metric is not None else None
        if plateau is not None:
            announce.observers = [*announce.observers, plateau]
        optimizer = OptimizerRecord(
            recipe.optimizer or settings.optimizer.build,
            of_recipe=recipe.optimizer is not None,
            saved=out is not None,
        )
        self.model = GivenModel(recipe.model)
        agree(session, start_conditions(driver, plan, recipe, settings))
        if lock is not None:
            on_rank_0(session, lambda: storage_of(lock.folder).check(lock.folder))
            lock.take(session, lambda note: announce(events.Warned(note)))
        self.able = able = driver.capabilities(plan)
        if world.size > 1:
            report_late_ranks(session, driver.name, able, announce, self._steps_done)
        largest = -(-settings.global_batch // world.num_readers)
        self.micro_batch = plan.micro_batch or largest
        if able.static_shapes:
            self.micro_batch = fitting_size(largest, self.micro_batch)
        self.account = MemoryAccount(
            driver, plan, session, settings, optimizer, self.micro_batch, out
        )
        self.recipe = dataclasses.replace(
            with_parts(recipe),
            optimizer=optimizer,
            model=self.account.noting_model(self.model),
        )
        self.memory = OutOfMemoryPolicy(
            *(settings, world, out, able.saves_memory, announce, self.account)
        )
        open_data = partial(
            open_dataset,
            session=session,
            collate=recipe.collate,
            count_items=recipe.count_items,
            fixed_size=able.static_shapes,
            workers=settings.data.workers,
        )
        self.open_data, self.may_halve = open_data, not able.static_shapes
        source = open_data(
            recipe.train_data,
            seed=settings.seed,
            global_batch=settings.global_batch,
            micro_batch=self.micro_batch,
            batch_warmup=settings.data.batch_warmup,
            batch_warmup_from=settings.data.batch_warmup_from,
            num_epochs=None if settings.steps else math.ceil(settings.epochs),
            shuffle=settings.data.shuffle,
            by_length=settings.data.by_length,
            lengths=recipe.lengths,
            drop_last=settings.data.drop_last,
            # prefetching must not draw from the generators whose state checkpoints hold
            isolate_random=able.feeds_ahead or None,
        )
        planned = Planned(settings, source, recipe.schedule, plateau)
        engine = self.memory.prepare(session, self.recipe)
        session.seed(settings.seed + 1 + world.feeder_index)
        parts = recipe.loss if isinstance(recipe.loss, LossParts) else None
        if parts is not None and isinstance(engine, TakesOverStep):
            announce(
                events.Warned("the parts of the loss are not logged: this driver steps itself")
            )
        turn_of = getattr(recipe.loss, "name_of_update", None)
        spikes = Spikes(settings.spikes, session, source.where, turn_of)
        size = settings.evaluate.micro_batch or self.micro_batch
        left_out = LeftOut(recipe, source, lambda note: announce(events.Warned(note)))
        rerun = rerun_of(self.recipe, world, source)
        averages = WeightAverages(settings, engine, driver.name)
        shows = shared(engine)
        after_update = AfterUpdate(recipe, engine, driver.name)
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
                left_out=left_out,
                max_batches=settings.evaluate.max_batches,
            ),
            spikes=spikes,
            nonfinite=(search := NonFiniteSearch(rerun, session, engine, settings)),
            turn_losses=TurnLosses(turn_of, session, parts),
            averages=averages,
            after_update=after_update,
            observers=ObserverStates(announce.observers),
            statistics=Statistics.of(settings, shows, session, driver.name),
            left_out=left_out,
            modules=ModuleState(engine, session, lambda note: announce(events.Warned(note))),
            number_next_update=numbering(engine),
        )
        saves = None if out is None else self._saves_to(out / CHECKPOINTS)
        times = TimeAccounting(clock, session, source, settings)
        digester = Digester(
            settings.digests, able, session, shows, self._is_logged, source.where, observers
        )
        self.policy = SettingsPolicy(
            *(self.state, engine.param_groups, saves, lock, announce, times, self.account),
            digester,
        )
        data: Groups = SkipGroups(source, spikes.left_out) if settings.spikes.roll_back else source
        data = times.watched(digester.watched(data, self._steps_done))
        data = search.watch(self.account.noting_batch(data))
        self.loop = TrainLoop(
            *(self.recipe, session, engine, data, planned.total, self.policy, requests),
            search.marking(self.account.marking(clock.mark)),
        )
        self.first_step = 0

    def _saves_to(self, folder: Place) -> Saves:
        guard = None if self.lock is None else self.lock.check_now
        store = checkpoint_store(folder, self.settings.checkpoint, guard)
        return Saves(store, self.announce, self.settings.checkpoint.stop_on_error)

    def _steps_done(self) -> int:
        """Return the number of steps done. Another thread calls it, possibly before the loop
        exists."""
        loop: TrainLoop | None = getattr(self, "loop", None)
        return loop.progress.step if loop is not None else 0

    def _is_logged(self, step: int) -> bool:
        return step % self.settings.log_every == 0 or step == self.loop.total_steps

    def resume(self, source: str | os.PathLike[str] | Url) -> None:
        """Restore the newest complete checkpoint in `source`, or `source` itself if it is a
        checkpoint."""
        left_out: list[str] = []
        path = find_checkpoint(
            self.session,
            source,
            self.out,
            verify=self.settings.checkpoint.verify,
            report=left_out.append,
        )
        if path is None:
            for note in left_out:
                self.announce(events.Warned(note))
            return
        manifest, notes = self.policy.restore(self.loop, path)
        self.first_step, self.policy.resumed_from = self.loop.progress.step, path
        if self.settings.steps is not None and self.first_step > self.settings.steps:
            raise SettingError(
                f"steps is {self.settings.steps}, and {path} is at step {self.first_step} already; "
                "steps counts from the beginning: give more, or resume from an earlier checkpoint"
            )
        self.state.evaluations.restore(stored_metrics(manifest.state, str(path)), self.first_step)
        changed = differences(manifest, self.settings, self.driver.name, self.session.world.size)
        self.announce(events.Resumed(path, self.first_step, (*left_out, *changed, *notes)))

    def execute(self, finish: Callable[[nn.Module], Any] | None) -> Result | RetryWithSmallerBatch:
        """Train to the end, or until memory runs out."""
        source, loop, policy = self.state.source, self.loop, self.policy
        self._tidy()
        if policy.saves is not None:
            self.state.modules.begin()
        if isinstance(loop.engine, KeepsWrites):
            self.announce.engine = loop.engine
        policy.clock.take()  # what came before is known to the observers by their own clocks
        total, optimizer = self.state.planned.total, self.state.optimizer
        self.announce(
            events.RunStarted(
                backend=self.driver.name,
                world=self.session.world,
                settings=self.settings,
                total_steps=total,
                steps_per_epoch=source.steps_per_epoch,
                num_samples=source.num_samples,
                num_parameters=loop.engine.num_parameters,
                first_step=self.first_step,
                out=self.out,
                flops_per_item=self.recipe.flops_per_item,
            )
        )
        for note in start_notes(self.settings, total, source, optimizer):
            self.announce(events.Warned(note))
        then = self._train()
        if isinstance(then, RetryWithSmallerBatch):
            return then
        step, steps = loop.progress.step, self.settings.steps
        self.announce.keep_errors()  # what was trained is saved first
        if then is NextAction.FINISHED and steps and step < steps:
            self.announce(events.Warned(f"the data ended after {step} of {steps} steps"))
        preempted = then is NextAction.PREEMPTED
        policy.finish(loop, preempted)
        texts = sentences(then.value, step, self.out, policy.saves, policy.checkpoint)
        ending = Ending(self.session, self.announce, self._all_failed, *texts)
        ending.attempt("the last evaluation", lambda: policy.evaluate_last(loop, preempted))
        finished = None
        if finish is not None and not preempted:
            finished = ending.attempt("`finish`", partial(self._call, finish))
        self.announce.engine = None
        self.model.give_back(loop.engine)
        best = None
        if self.recipe.eval_data:
            best = ending.attempt("looking for the best checkpoint", policy.best_checkpoint)
        if ending.error is not None:
            ending.close(preempted)
        self.announce(policy.times.ended(step))
        seconds, lost = time.perf_counter() - self.started, len(lost_ranks.lost())
        self.announce(events.RunEnded(step, then.value, seconds, lost))
        ending.close(preempted)
        return Result(
            step,
            then.value,
            self.state.loss,
            self.state.evaluations.metrics,
            policy.checkpoint,
            finished,
            "" if policy.saves is None else policy.saves.error,
            0 if policy.saves is None else policy.saves.num_saved,
            None if best is None else best[0],
        )

    def _call(self, finish: Callable[[nn.Module], Any]) -> Any:
        engine = self.loop.engine
        with self.policy.clock.within(OBSERVERS), engine.full_params() as module:
            module.eval()
            return finish(module)

    def _tidy(self) -> None:
        """Remove unfinished files of a killed run, except a checkpoint that this run resumed
        from."""
        resumed_from = self.policy.resumed_from
        is_read = resumed_from is not None and resumed_from.name.startswith(".")
        if self.out is not None and self.session.world.rank == 0 and not is_read:
            tidy(self.out / CHECKPOINTS)

    def _all_failed(self, error: Exception | SystemExit) -> bool:
        why = ended_by(self.session.world.rank, error)
        return abort_ranks(self.session, self.able, why, retry=True)

    def _check_sanity(self) -> None:
        """Make the sanity check unless it is disabled or no step is left."""
        settings, loop = self.settings, self.loop
        if not settings.evaluate.sanity_check or loop.progress.step >= loop.total_steps:
            return
        eager = torch.compiler.set_stance("force_eager") if settings.compile else nullcontext()
        sanity = SanityCheck(
            *(self.session, loop.engine, self.recipe, settings),
            *(self.open_data, self.micro_batch, self.may_halve, loop.progress.step > 0),
        )
        with eager:
            with skipped_without_memory(self.session.world.size):
                sanity.check()
            if sanity.needs_first:
                self._check_first(sanity)

    def _check_first(self, sanity: SanityCheck) -> None:
        """Make the check that reads the first microbatch, which the loop then receives."""
        loop, progress = self.loop, self.loop.progress
        loop.data = ahead = ReadAhead(loop.data)
        with self.policy.clock.within(DATA):
            first = ahead.first(progress.position, loop.total_steps - progress.step)
        try:
            if first is not None:
                sanity.check_first(first)
        except BaseException:
            ahead.close()
            raise

    def _train(self) -> NextAction | RetryWithSmallerBatch:
        asked = self.announce.requests.is_asked
        now = [asked(events.Request.PREEMPT), asked(events.Request.STOP)]
        preempted, stopped = (any(ranks) for ranks in zip(*self.session.exchange(now), strict=True))
        if preempted or stopped:
            # a signal arrived during construction, or the run was stopped before: make no step,
            # which may compile
            return NextAction.PREEMPTED if preempted else NextAction.STOPPED
        try:
            self._check_sanity()
            statistics = self.state.statistics
            watching = nullcontext() if statistics is None else statistics.watching(self.loop)
            finding = self.policy.times.finder or nullcontext()
            with watching, finding, survivors_frozen(), self.account:
                self.policy.begin(self.loop)
                return self.loop.run()
        except OutOfMemory as error:
            self.account.save_snapshot(f"memory-rank-{self.session.world.rank}.json")
            raise OutOfMemory(f"{error}; {self.memory.advice()}") from error
        except Exception as error:
            if not ran_out(error):
                raise
            self.account.save_snapshot(f"memory-rank-{self.session.world.rank}.json")
            cause = str(error)
        # here, since nothing holds the tensors of the failed step any more
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

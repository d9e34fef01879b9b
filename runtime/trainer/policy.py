"""Actions between the steps of a run, by its settings."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

from ..checkpoint import CheckpointStore, Manifest
from ..kernel import events
from ..kernel.batches import Group, Position
from ..kernel.errors import SettingError
from ..kernel.loop import NextAction, TrainLoop
from ..kernel.paths import Place, place
from ..kernel.step import StepResult
from .announce import Announcer, log_of, never_finite, unused_note
from .digests import Digester
from .due import Due
from .memory_account import MemoryAccount
from .run_lock import RunLock
from .run_state import RunState
from .saves import Saves
from .settings import CheckpointSettings
from .start_checks import on_rank_0
from .step_clock import COMPUTE, EVALUATION, SAVING, STARTING, UPDATE
from .time_accounting import TimeAccounting

__all__ = ["SettingsPolicy"]


class OutlivesRanks(Protocol):
    """Holds the state of a run for the time when ranks die."""

    def ended(self, loop: TrainLoop, /) -> None:
        """Called after each update, before anything else is done."""

    def begin(self, loop: TrainLoop, /) -> None:
        """See `SettingsPolicy.begin`."""

    def admit(self, loop: TrainLoop, /) -> NoReturn:
        """Let other ranks join, which ends this call of `loop.run`. Called by all ranks, at the end
        of a step."""


class SettingsPolicy:
    """The kernel's `LoopPolicy`: sets the rates, logs, evaluates, saves, and rolls back to a
    checkpoint after a loss spike. `saves`: None if the run saves nothing."""

    def __init__(
        self,
        state: RunState,
        param_groups: Sequence[Mapping[str, Any]],
        saves: Saves | None,
        lock: RunLock | None,
        announce: Announcer,
        times: TimeAccounting,
        memory: MemoryAccount,
        digester: Digester,
    ) -> None:
        self.times, self.clock, self.memory = times, times.clock, memory
        self.digester = digester
        self.state, self.settings, self.saves, self.lock = state, state.settings, saves, lock
        self.announce, self.requests = announce, announce.requests
        self.resumed_from: Place | None = None
        self._base_rates = [group["lr"] for group in param_groups]
        self._unused_reported = self._got_ready = False
        self._skipped: events.StepSkipped | None = None
        """The last step that was not applied."""
        self._first_nonfinite = ""
        """Describes the first tensor that was not finite, of the last step that was searched."""
        self.outlives: OutlivesRanks | None = None
        """Receives each step, if the run outlives its ranks."""
        self._due, self._due_step = Due(), 0
        self._saved_at = time.monotonic()
        self._shares = self._shares_until(Position())
        self._evaluation_due = False
        """True if the settings or an observer ask for an evaluation of the last step, which is made
        once that step is saved."""
        self._best: float | None = None
        """The least score among saved evaluations; None until it is first computed."""

    @property
    def checkpoint(self) -> Place | None:
        """The newest checkpoint that this run saved or resumed from."""
        return (self.saves and self.saves.newest) or self.resumed_from

    # --- between steps (see `LoopPolicy`) ------------------------------------------------------

    def begin(self, loop: TrainLoop) -> None:
        """Called right before the first step of this policy."""
        if self.outlives is not None:
            self.outlives.begin(loop)

    def before_update(self, loop: TrainLoop) -> None:
        self.state.optimizer.refuse_thawed()
        if not self._unused_reported:
            self._unused_reported = True
            if unused := loop.engine.unused():
                self.announce(events.Warned(unused_note(unused)))
            self.memory.before_first_update()
        self.state.averages.catch_up(loop)
        groups = loop.engine.param_groups
        added = groups[len(self._base_rates) :]  # by an observer, say
        self._base_rates += [group["lr"] for group in added]
        rates = self.state.planned.rates(loop.progress.applied, self._base_rates)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        if (statistics := self.state.statistics) is not None:
            statistics.before_update(loop.progress.step + 1)
        self.digester.before_update(loop.progress.step + 1)
        self.state.number_next_update(loop)
        self.clock.mark(UPDATE)

    def after_step(self, loop: TrainLoop, group: Group, result: StepResult) -> NextAction:
        step, settings = loop.progress.step, self.settings
        last = step >= loop.total_steps
        self.state.after_update.run(loop)
        if self.outlives is not None:
            self.outlives.ended(loop)
        self.state.nonfinite.ended(group, result.items)
        if result.items < group.num_samples:
            self.state.left_out.ended(step, group, result.items)
        if not result.items:
            loop.window.empty_steps += 1
        if (statistics := self.state.statistics) is not None:
            statistics.after_update(step)
        if self.lock is not None:
            self.lock.check()
        self.state.modules.after_step()
        if not self._got_ready:
            self._got_ready = True
            if counted := self.memory.after_first_step(step):
                self.announce(counted)
            self.times.begin(loop.progress)
            if (
                self.saves is not None
                and settings.checkpoint.background
                and settings.checkpoint.every
            ):
                self.saves.store.get_ready(loop.engine, self.state.session)
        if last:
            self.announce.keep_errors()
        if self.announce.observers:
            self.announce(events.StepEnded(step))
        if result.items:
            self.state.turn_losses.add(step, result.loss)
        self.digester.add(result.loss)
        if self.state.spikes.watches:
            self.state.spikes.add(step, group, result.loss)
        requests = loop.agreed(result)
        self._request_timed_save()
        due = self.take_due(loop)
        due.log |= requests[events.Request.LOG] > 0
        due.evaluate |= requests[events.Request.EVALUATE] > 0
        due.save |= requests[events.Request.SAVE] > 0
        rolled_back = (due.log or due.save) and self._report_spikes() and self._roll_back(loop)
        stops = False
        if rolled_back:
            self.announce.raise_errors()
        else:
            stops = self.act(loop, due, requests)
        if requests[events.Request.PREEMPT]:
            return NextAction.PREEMPTED
        if requests[events.Request.STOP] or stops:
            return NextAction.STOPPED
        if rolled_back:
            return NextAction.ROLLED_BACK
        if requests[events.Request.JOIN] and self.outlives is not None and not last:
            self.outlives.admit(loop)
        return NextAction.CONTINUE

    def act(self, loop: TrainLoop, due: Due, requests: Sequence[float]) -> bool:
        """Do what is due after the last step. Return True if an observer ends the run by the
        figures of an evaluation."""
        stops = False
        if due.log:
            self.log(loop)
            loop.start_window()
            self.state.turn_losses.start_window()
            due.log = False
        if due.evaluate and loop.progress.step >= loop.total_steps:
            self._evaluation_due = True
        elif due.evaluate:
            self.evaluate(loop)
            due.evaluate = False
            # the logged figures are known now, and an observer may end the run by them
            stops = any(self.state.session.exchange(self.requests.is_asked(events.Request.STOP)))
            due.save |= self._is_best(loop.progress.step)
        if self.saves is not None and self.saves.in_progress:
            with self.clock.within(SAVING):
                self.requests.ask(self.saves.after_step(requests))
            loop.window.leave_out(self.saves.take_seconds())
        if due.save:
            self.save(loop, self.settings.checkpoint.background)
            due.save = False
        return stops

    def take_due(self, loop: TrainLoop) -> Due:
        """Return what the settings ask for after this step, and note it."""
        if self._due_step != loop.progress.step:
            self._due_step = step = loop.progress.step
            before, self._shares = self._shares, self._shares_until(loop.progress.position)
            self._due = Due(
                log=_due(step, self.settings.log_every),
                evaluate=_due(step, self.settings.evaluate.every) or self._shares > before,
                save=_due(step, self.settings.checkpoint.every),
            )
        return self._due

    def set_due(self, loop: TrainLoop, due: Due) -> None:
        """Note what is due after the step that was restored."""
        self._due, self._due_step = due, loop.progress.step

    def _request_timed_save(self) -> None:
        """On rank 0, request a save when `checkpoint.every_minutes` has passed. All ranks save
        after the next step."""
        minutes = self.settings.checkpoint.every_minutes
        if minutes is None or self.state.session.world.rank:
            return
        if time.monotonic() - self._saved_at >= 60 * minutes:
            self._saved_at = time.monotonic()
            self.requests.ask(events.Request.SAVE)

    def skipped(self, loop: TrainLoop, event: events.StepSkipped, group: Group) -> None:
        samples = self.state.source.where(group.position, group.num_samples)
        self._skipped = dataclasses.replace(event, samples=samples)
        self.announce(self._skipped)
        if found := self.state.nonfinite.find(event, group):
            self._first_nonfinite = found.text
            self.announce(found)
        if event.in_a_row >= self.settings.max_nonfinite:
            self._end_never_finite(loop, self._skipped)

    def _end_never_finite(self, loop: TrainLoop, event: events.StepSkipped) -> NoReturn:
        if self.saves is not None:
            self.saves.finish()
        limit = self.settings.max_nonfinite
        found = self._first_nonfinite
        raise never_finite(event, loop.progress.applied, limit, self.checkpoint, found)

    # --- actions between steps and at the end ---------------------------------------------------

    def finish(self, loop: TrainLoop, preempted: bool) -> None:
        """After the last step, log and save. Returns when everything is written."""
        if loop.window.has_grown(loop.progress):
            self.log(loop)  # keep the window: a longer run resumes the log here
        self.times.judge(loop.progress)
        self._report_spikes()
        loop.resolve_pending_outcome()
        if self._skipped is not None and not preempted and not loop.progress.applied:
            self._end_never_finite(loop, self._skipped)
        if preempted or self.settings.checkpoint.at_end:
            self.save(loop, in_background=False)
        self.close()

    def evaluate_last(self, loop: TrainLoop, preempted: bool) -> None:
        """After `finish`, make the last evaluation: what was trained is saved first, since an
        evaluation may raise, run out of memory or be killed."""
        step, settings = loop.progress.step, self.settings.evaluate
        at_end = not preempted and (settings.at_end or _due(step, settings.every))
        if not (at_end or self._evaluation_due):
            return
        self.evaluate(loop)
        if self._evaluation_due and self._is_best(step):
            self.save(loop, in_background=False)
        self.close()

    def close(self) -> None:
        """Wait until all that is saved is written."""
        if self.saves is not None:
            with self.clock.within(SAVING):
                self.saves.close()

    def log(self, loop: TrainLoop) -> None:
        """Announce the figures of the steps since the last log."""
        with self.clock.within(COMPUTE):  # for which it waits
            digests = self.digester.begin(loop)
            loop.resolve_pending_outcome()
            loop.audit()
            losses = self.state.turn_losses.means()
            logged = log_of(loop, self.state.source.length_at, self.clock, losses)
            found = digests()
        self.state.loss = logged.loss
        self.announce(logged)
        if found is not None:
            self.announce(found)
        if (statistics := self.state.statistics) and (stats := statistics.take(logged.step)):
            self.announce(stats)
        if spent := self.times.logged(loop.progress):
            self.announce(spent)

    def evaluate(self, loop: TrainLoop) -> None:
        """Measure all evaluation data, unless this step's was."""
        self.state.averages.catch_up(loop)
        with self.clock.within(EVALUATION):
            loop.window.leave_out(self.state.evaluations.run(loop.progress.step))
        self.times.evaluations += 1
        if self.saves is not None:  # for a step that was saved before it was measured
            self.saves.amend(loop.progress.step, self.state.session, self.state.measured(loop))

    def save(self, loop: TrainLoop, in_background: bool) -> None:
        """Save this step, or begin to save it in the background, unless it was saved already."""
        loop.resolve_pending_outcome()
        if self.saves is not None:
            self._saved_at = time.monotonic()
            with self.clock.within(SAVING):
                self.saves.save(loop.progress.step, in_background, lambda: self.state.to_save(loop))
            self.times.saves += 1
            loop.window.leave_out(self.saves.take_seconds())

    def _is_best(self, step: int) -> bool:
        """True if this evaluation is better than the evaluations of all checkpoints, and must be
        saved."""
        keep = self.settings.checkpoint
        value = self.state.evaluations.to_json(step).get(keep.best_metric)
        asked = keep.save_best or keep.best_metric != CheckpointSettings.best_metric
        if self.saves is None or not asked or value is None:
            return False
        sign = 1.0 if keep.best_mode == "min" else -1.0
        if self._best is None:
            best = self.best_checkpoint()
            self._best = math.inf if best is None else sign * best[1]
        better, self._best = sign * value < self._best, min(sign * value, self._best)
        return better

    def best_checkpoint(self) -> tuple[Place, float] | None:
        """Return the best checkpoint by `checkpoint.best_metric`, and the metric; None if no
        checkpoint has it. Called by all ranks."""

        def look(store: CheckpointStore) -> list[Any]:
            found = store.best()
            return [] if found is None else [str(found[0]), found[1]]

        if self.saves is None:
            return None
        found = on_rank_0(self.state.session, partial(look, self.saves.store))
        return (place(found[0]), found[1]) if found else None

    def restore(self, loop: TrainLoop, path: Place) -> tuple[Manifest, tuple[str, ...]]:
        """Restore a checkpoint, which need not be saved again; see `RunState.restore`."""
        restored = self.state.restore(loop, path)
        self.digester.restart()
        self.set_due(loop, Due())
        self._shares = self._shares_until(loop.progress.position)
        if self.saves is not None:
            self.saves.mark_saved(loop.progress.step)
        return restored

    def _shares_until(self, position: Position) -> int:
        """Return the number of evaluations due by `evaluate.every_epochs` up to a position. Raises
        `SettingError` if an epoch has no length."""
        share = self.settings.evaluate.every_epochs
        if share is None:
            return 0
        length = self.state.source.length_at(position)
        if length is None:
            raise SettingError(
                f"evaluate.every_epochs is {share}, and the data has no length to take a share "
                "of: set evaluate.every, in steps"
            )
        return int((position.epoch + position.samples / length) / share + 1e-9)

    def _report_spikes(self) -> bool:
        """Announce the spikes since the last call; returns True if there were any."""
        found = self.state.spikes.find()
        for spike in found:
            self.announce(spike)
        return bool(found)

    def _roll_back(self, loop: TrainLoop) -> bool:
        """Roll back to the newest checkpoint, if `spikes.roll_back` is set and a checkpoint
        exists."""
        spikes, settings = self.state.spikes, self.settings.spikes
        if not settings.roll_back:
            return False
        if self.saves is not None:
            self.saves.finish()
        path = self.checkpoint
        if path is None:
            note = "there is no checkpoint to roll back to: training continues. Save some"
            self.announce(events.Warned(note))
            return False
        if spikes.roll_backs == settings.max_roll_backs:
            raise spikes.diverged(path)
        spikes.roll_backs += 1
        with self.clock.within(STARTING):
            self.restore(loop, path)
        self.announce(events.RolledBack(loop.progress.step, path, len(spikes.left_out)))
        return True


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0

"""Acts between the steps of a run, as its settings say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..checkpoint import Manifest
from ..kernel import events
from ..kernel.batches import Group
from ..kernel.loop import NextAction, TrainLoop
from ..kernel.paths import Place
from ..kernel.step import StepResult
from .announce import Announcer, log_of, never_finite, unused_note
from .run_lock import RunLock
from .run_state import RunState
from .saves import Saves

__all__ = ["SettingsPolicy"]


class SettingsPolicy:
    """The kernel's `LoopPolicy`: it sets the rates, logs, evaluates, saves, and goes back to a
    checkpoint where the loss has spiked. `saves`: None where the run saves nothing."""

    def __init__(
        self,
        state: RunState,
        param_groups: Sequence[Mapping[str, Any]],
        saves: Saves | None,
        lock: RunLock | None,
        announce: Announcer,
    ) -> None:
        self.state, self.settings, self.saves, self.lock = state, state.settings, saves, lock
        self.announce, self.requests = announce, announce.requests
        self.loss = math.nan
        """The last one logged."""
        self.resumed_from: Place | None = None
        self._base_rates = [group["lr"] for group in param_groups]
        self._unused_told = self._got_ready = False

    @property
    def checkpoint(self) -> Place | None:
        """The newest that this run saved or resumed from."""
        return (self.saves and self.saves.newest) or self.resumed_from

    # --- between steps (see `LoopPolicy`) ------------------------------------------------------

    def before_update(self, loop: TrainLoop) -> None:
        if not self._unused_told:
            self._unused_told = True
            if unused := loop.engine.unused():
                self.announce(events.Warned(unused_note(unused)))
        self.state.averages.catch_up(loop)
        rates = self.state.planned.rates(loop.progress.applied, self._base_rates)
        for group, rate in zip(loop.engine.param_groups, rates, strict=True):
            group["lr"] = rate

    def after_step(self, loop: TrainLoop, group: Group, result: StepResult) -> NextAction:
        step, settings = loop.progress.step, self.settings
        if self.lock is not None:
            self.lock.check()
        if not self._got_ready:
            self._got_ready = True
            if self.saves is not None and settings.checkpoint.behind and settings.checkpoint.every:
                self.saves.store.get_ready(loop.engine, self.state.session)
        if self.announce.observers:
            self.announce(events.StepEnded(step))
        self.state.turn_losses.add(step, result.loss)
        if self.state.spikes.watches:
            self.state.spikes.add(step, group, result.loss)
        requests = loop.agreed(result)
        log = requests[events.Request.LOG] or _due(step, settings.log_every)
        save = requests[events.Request.SAVE] or _due(step, settings.checkpoint.every)
        rolled_back = (log or save) and self._tell_spikes() and self._roll_back(loop)
        if not rolled_back:
            if log:
                self.log(loop)
                loop.start_window()
                self.state.turn_losses.start_window()
            if requests[events.Request.EVALUATE] or _due(step, settings.evaluate.every):
                self.evaluate(loop)
            if self.saves is not None and self.saves.under_way:
                self.requests.ask(self.saves.after_step(requests))
                loop.window.leave_out(self.saves.take_seconds())
            if save:
                self.save(loop, settings.checkpoint.behind)
        if requests[events.Request.PREEMPT]:
            return NextAction.PREEMPTED
        if requests[events.Request.STOP]:
            return NextAction.STOPPED
        return NextAction.ROLLED_BACK if rolled_back else NextAction.GO_ON

    def skipped(self, loop: TrainLoop, event: events.StepSkipped, group: Group) -> None:
        samples = self.state.source.where(group.position, group.num_samples)
        self.announce(dataclasses.replace(event, samples=samples))
        if event.in_a_row >= self.settings.max_nonfinite:
            if self.saves is not None:
                self.saves.finish()
            raise never_finite(event, samples, self.settings.max_nonfinite, self.checkpoint)

    # --- what is done then, and at the end -----------------------------------------------------

    def finish(self, loop: TrainLoop, preempted: bool) -> None:
        """After the last step: log, evaluate and save as at the end of a run, or, `preempted`, save
        alone. Returns when all is written."""
        if loop.window.has_grown(loop.progress):
            self.log(loop)  # and the window stays open: a longer run logs as if none had ended here
        self._tell_spikes()
        if not preempted and self.settings.evaluate.at_end:
            self.evaluate(loop)
        if preempted or self.settings.checkpoint.at_end:
            self.save(loop, in_background=False)
        if self.saves is not None:
            self.saves.close()

    def log(self, loop: TrainLoop) -> None:
        """Announce the figures of the steps since the last log."""
        loop.resolve_pending_outcome()
        logged = log_of(loop, self.state.source, self.state.turn_losses.means())
        self.loss = logged.loss
        self.announce(logged)

    def evaluate(self, loop: TrainLoop) -> None:
        """Measure all evaluation data, unless this step's was."""
        self.state.averages.catch_up(loop)
        loop.window.leave_out(self.state.evaluations.run(loop.progress.step))

    def save(self, loop: TrainLoop, in_background: bool) -> None:
        """Save this step, unless it was, or begin to."""
        loop.resolve_pending_outcome()
        if self.saves is not None:
            self.saves.save(loop.progress.step, in_background, lambda: self.state.to_save(loop))
            loop.window.leave_out(self.saves.take_seconds())

    def restore(self, loop: TrainLoop, path: Place) -> tuple[Manifest, tuple[str, ...]]:
        """Take over that checkpoint, which need not be saved again; see `RunState.restore`."""
        restored = self.state.restore(loop, path)
        if self.saves is not None:
            self.saves.is_saved(loop.progress.step)
        return restored

    def _tell_spikes(self) -> bool:
        """Announce the spikes since the last call; returns True if there were any."""
        found = self.state.spikes.find()
        for spike in found:
            self.announce(spike)
        return bool(found)

    def _roll_back(self, loop: TrainLoop) -> bool:
        """Go back to the newest checkpoint, if that is wanted and there is one."""
        spikes, settings = self.state.spikes, self.settings.spikes
        if not settings.roll_back:
            return False
        if self.saves is not None:
            self.saves.finish()
        path = self.checkpoint
        if path is None:
            note = "there is no checkpoint to roll back to: training goes on. Save some"
            self.announce(events.Warned(note))
            return False
        if spikes.roll_backs == settings.max_roll_backs:
            raise spikes.diverged(path)
        spikes.roll_backs += 1
        self.restore(loop, path)
        self.announce(events.RolledBack(loop.progress.step, path, len(spikes.left_out)))
        return True


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0

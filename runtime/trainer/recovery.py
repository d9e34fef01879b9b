"""Continuing without ranks that died, in the processes of the others (`recover=in_place`).

The step during which a rank dies is abandoned, and nothing of it is applied. The others meet in a
new process group, build the engine again, take over the state of the one that has done the most
steps (an update may have been applied on some ranks and not on others), and run the same step
again: the same samples, shared out over fewer ranks. Whatever was left to do after the last step,
such as an evaluation, is done again, too.

The state goes through a checkpoint in memory, so that it is restored, and checked, like any other.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import lost_ranks
from ..checkpoint import CheckpointStore
from ..checkpoint.background import background_finished
from ..data.prebatched import Batches
from ..kernel.contract import Engine, Session
from ..kernel.errors import CapabilityRefused, SaveFailed, SettingError
from ..kernel.events import Event, Request, Requests, Warned
from ..kernel.loop import TrainLoop
from ..kernel.optional import HoldsAll, LeavesRanks
from ..kernel.paths import place
from ..kernel.recipe import Recipe
from .losses_kept import continue_window, losses_of_all, note, note_begun_steps
from .policy import Due
from .saves import stored_metrics
from .settings import Settings

if TYPE_CHECKING:
    from .run import Run

__all__ = ["RankLost", "Recovery", "Reformed"]

IN_PLACE = "in_place"
_REPORTED_SECONDS = 1.0
"""Time within which the launcher reports a rank whose death has made a call fail."""


@dataclass(frozen=True)
class RankLost(Event):
    """Ranks have died, and the others continue without them."""

    step: int
    """Number of steps done."""
    ranks: tuple[int, ...]
    """The numbers that the dead ranks were started with."""
    left: int
    """Number of ranks that are left."""


@dataclass(frozen=True)
class Reformed(Event):
    """The ranks that are left have the state of the last step, and continue."""

    step: int
    world_size: int
    seconds: float
    """Time in which training stood still, from the report of the death on."""
    parts: Mapping[str, float]
    """These seconds, by what they were spent on."""


class _SentRequests(Requests):
    """Requests of this rank, which remembers those that were sent with the last two steps: a step
    that is abandoned takes them along."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: list[Sequence[float]] = []

    def send(self) -> Sequence[float]:
        sent = super().send()
        if any(sent) or self._sent:
            self._sent = [*self._sent[-1:], sent]
        return sent

    def ask_again(self) -> None:
        """Ask again for all that was sent lately. What was done already is done once more."""
        for request in Request:
            if request is not Request.WRITTEN and any(sent[request] for sent in self._sent):
                self.ask(request)
        self._sent.clear()


class Recovery:
    """Continues one call of `fit` without the ranks that die."""

    def __init__(self, settings: Settings, recipe: Recipe) -> None:
        self.settings, self.is_on = settings, settings.recover == IN_PLACE
        self.requests = _SentRequests() if self.is_on else Requests()
        self._run: Run | None = None
        """The run whose state counts; None before the first step."""
        self._members: Sequence[int] = ()
        """The numbers that the ranks of that run were launched with."""
        self._kept_step = -1
        self._random: dict[str, Tensor] = {}
        self._notes: Sequence[str] = ()
        self._freezes = False
        self._lost: tuple[int, ...] = ()
        """The ranks that have died since the last step."""
        self._since, self._parts = 0.0, dict[str, float]()
        self._unlogged: Mapping[str, float] = {}
        """The seconds of each part of the steps since the last log."""
        if self.is_on:
            _check(recipe)
            self._freezes = not gc.get_freeze_count()
            gc.collect()
            gc.freeze()  # so that a run which is replaced is collected in no time
        elif settings.max_lost is not None:
            raise SettingError(
                f"max_lost is {settings.max_lost}, and recover is {settings.recover!r}: set "
                "recover=in_place, or leave max_lost out"
            )

    def keep(self, run: Run) -> None:
        """Note that `run` has its state from now on, and holds it after each step."""
        if not self.is_on:
            return
        self._run, self._members = run, lost_ranks.members()
        engine = run.loop.engine
        if not (isinstance(engine, HoldsAll) and isinstance(run.session, LeavesRanks)):
            raise CapabilityRefused(
                "recover=in_place",
                run.driver.name,
                "its ranks do not hold all of the state, each of them: take a backend whose ranks "
                "hold the whole model, or leave it out, and start the run again with --resume auto "
                "when a rank has died",
            )
        if self._lost:
            gc.collect()  # the run before, with its model, and the threads of its process group
            size = run.session.world.size
            run.announce(RankLost(run.loop.progress.step, self._lost, size))
        run.policy.outlives = self
        note_begun_steps(run.loop)
        self._keep_boundary(run.loop)

    def close(self) -> None:
        """Hold nothing any more, at the end of `fit`."""
        self._run = None
        if self._freezes:
            gc.unfreeze()

    def drop(self) -> None:
        """Hold no state any more: the run starts again from a checkpoint of its own."""
        self._run = None

    def ended(self, loop: TrainLoop) -> None:
        """See `OutlivesRanks`."""
        self._keep_boundary(loop)

    def _keep_boundary(self, loop: TrainLoop) -> None:
        """Keep what the next step changes before its update."""
        assert isinstance(loop.engine, HoldsAll)
        self._kept_step = loop.progress.step
        self._random = loop.session.rng_state()
        loop.engine.begin_step()
        note(loop)

    def continues_after(self, error: Exception) -> bool:
        """Return True if `error` was caused by the death of other ranks: train again then, with the
        state that is held. This process has its new rank from then on."""
        if not self.is_on or not lost_ranks.await_new(_REPORTED_SECONDS):
            return False
        if not self._lost:
            self._since, self._parts = time.perf_counter(), {}
            self._unlogged = {} if self._run is None else self._run.policy.clock.take()
        with background_finished():
            pass  # what a thread still writes is not committed, and removed
        while lost_ranks.is_new():
            newly = lost_ranks.newly_lost()
            lost_ranks.renumber()
            self._lost += newly
        if (run := self._run) is not None:
            assert isinstance(run.session, LeavesRanks)
            if run.session.world.size > 1 and self._kept_step != run.loop.progress.step:
                self._keep_boundary(run.loop)  # ranks met between the update and the end of it
            run.session.leave()
        if isinstance(self.requests, _SentRequests):
            self.requests.ask_again()
        most = self.settings.max_lost
        if most is not None and len(lost_ranks.lost()) > most:
            self.requests.ask(Request.PREEMPT)
        self._spent("noticing")
        return True

    def shared(self, session: Session) -> _Shared | None:
        """Return the state to continue with, once the ranks have met again; None if there is none,
        and the run begins as it did. Called by all ranks."""
        if not lost_ranks.generation():
            return None
        self._spent("meeting")
        run = self._run
        mine = None if run is None else _Position.of(run)
        known = [each and _Position(*each) for each in session.exchange(mine and mine.to_json())]
        newest = max((each for each in known if each), key=lambda each: each.step, default=None)
        if newest is None:
            return None
        source, answer, failed = known.index(newest), ["", [""]], ""
        if session.world.rank == source and run is not None:
            try:
                answer = self._write(run, newest, [each for each in known if each])
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"
        path, notes, failed = session.exchange([*answer, failed])[source]
        if failed:
            raise SaveFailed(f"the state could not be passed on in memory: {failed}")
        self._spent("passing the state on")
        return _Shared(Path(path), newest, source, notes)

    def _write(self, run: Run, newest: _Position, known: Sequence[_Position]) -> list[Any]:
        """Write the state of this rank's run to a checkpoint in memory. Return its place, and notes
        on what it lacks."""
        root = lost_ranks.shared_folder()
        for before in root.iterdir():  # of ranks that died meanwhile
            shutil.rmtree(before)
        run.session.set_rng_state(self._random)
        what = run.state.to_save(run.loop)
        notes = []
        if newest.first_step < newest.step:
            there = {each.number: each.losses for each in known if each.step == newest.step}
            losses, missing = losses_of_all(newest.step, newest.first_step, there, self._members)
            what["state"]["window"]["losses"] = losses
            if missing:
                notes.append(
                    f"the losses since the last log lack those of rank {missing}, which are not "
                    "known: the next log shows the mean of the others"
                )
            if run.state.turn_losses.keeps:
                notes.append(
                    "the next log shows the loss of each turn, or part, of one rank alone for the "
                    "steps before the death"
                )
        what["engine"] = _Held(run.loop.engine)
        path = CheckpointStore(root / str(lost_ranks.generation())).save(**what)
        return [str(path), notes]

    def restore(self, run: Run, shared: _Shared) -> None:
        """Give the state to a run that was built again. Called by all ranks."""
        self._spent("building")
        before = self._run
        manifest, _ = run.policy.restore(run.loop, place(shared.path))
        step = run.first_step = run.loop.progress.step
        if before is not None:
            run.session.set_rng_state(self._random)
            continue_window(run.loop, before.loop, shared.newest.grad_norm)
            run.state.evaluations.metrics = before.state.evaluations.metrics
            run.state.loss = before.state.loss
            for group, rate in zip(run.loop.engine.param_groups, shared.newest.rates, strict=True):
                group["lr"] = rate
        run.state.evaluations.restore(stored_metrics(manifest.state, str(shared.path)), step)
        self._notes = shared.notes
        shared.newest.give_to(run)
        run.session.exchange(None)  # all have read it
        if run.session.world.rank == shared.source:
            shutil.rmtree(shared.path.parent)
        self._spent("restoring")

    def begin(self, loop: TrainLoop) -> None:
        """See `OutlivesRanks`. After a loss, announce it, and do what is due after the step that
        was restored."""
        run, lost = self._run, self._lost
        if run is None or not lost:
            return
        self._spent("checking")
        step, size, parts = loop.progress.step, loop.session.world.size, dict(self._parts)
        seconds = sum(parts.values())
        run.announce(Reformed(step, size, seconds, parts))
        loop.window.leave_out(seconds)
        run.policy.clock.take()
        run.policy.clock.add(self._unlogged)
        for text in self._notes:
            run.announce(Warned(text))
        self._lost = ()
        run.policy.act(loop, run.policy.take_due(loop), [0.0] * len(Request))

    def _spent(self, part: str) -> None:
        now = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._since
        self._since = now


@dataclass(frozen=True)
class _Shared:
    """The state that all ranks take over."""

    path: Path
    newest: _Position
    source: int
    """The rank that wrote it."""
    notes: Sequence[str]


@dataclass(frozen=True)
class _Position:
    """How far a rank has come."""

    step: int
    number: int
    """The number that the rank was launched with."""
    first_step: int
    losses: float | None
    grad_norm: float
    """The gradient norm of the last step, and its learning rates."""
    rates: list[float]
    due: tuple[bool, bool, bool]
    """The fields of `Due`."""
    saved: bool
    """True if the checkpoint of the step exists."""
    checkpoint: str
    """The newest one; empty if there is none."""
    num_saved: int
    error: str
    """Why the last save failed."""

    @classmethod
    def of(cls, run: Run) -> _Position:
        loop, due = run.loop, run.policy.take_due(run.loop)
        saves, checkpoint = run.policy.saves, run.policy.checkpoint
        in_progress = saves is not None and saves.in_progress
        window, progress, grad_norm = loop.window, loop.progress, math.nan
        if window.has_grown(progress):
            grad_norm = window.figures(progress, loop.session)["grad_norm"]
        losses = float(window.loss_sum)
        return cls(
            loop.progress.step,
            lost_ranks.own_number(),
            loop.window.first_step,
            losses if math.isfinite(losses) else None,
            grad_norm,
            [group["lr"] for group in loop.engine.param_groups],
            (due.log, due.evaluate, due.save or in_progress),
            saves is not None and saves.holds(progress.step),
            "" if checkpoint is None else str(checkpoint),
            0 if saves is None else saves.num_saved,
            "" if saves is None else saves.error,
        )

    def give_to(self, run: Run) -> None:
        """Let a run that was built again know what this rank knew: alike on all ranks."""
        run.policy.resumed_from = place(self.checkpoint) if self.checkpoint else None
        run.policy.set_due(run.loop, Due(*self.due))
        if (saves := run.policy.saves) is not None:
            saves.mark_saved(self.step if self.saved else -1)
            saves.num_saved, saves.error = self.num_saved, self.error

    def to_json(self) -> list[Any]:
        return list(dataclasses.astuple(self))


class _Held:
    """The engine of a rank that has left the others, as a checkpoint sees it."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine, HoldsAll)
        self.shards, self.tied = engine.held, engine.tied


def _check(recipe: Recipe) -> None:
    """Raise an error if this run cannot continue without a rank."""
    if not lost_ranks.is_reported():
        raise SettingError(
            "recover=in_place needs a launcher that reports dead ranks: start several ranks on one "
            "machine by `drivetrain train RECIPE.py --nproc N --set recover=in_place`, or leave it "
            "out, and start the run again with --resume auto when a rank has died"
        )
    if isinstance(recipe.train_data, Batches):
        raise SettingError(
            "recover=in_place shares the samples of a dead rank out over the others, and a "
            "loader in Batches gives each rank samples of its own: give a data set, or leave "
            "recover out"
        )

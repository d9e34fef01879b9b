"""Continuing without ranks that died, in the processes of the others (`recover=in_place`).

The step during which a rank dies is abandoned, and nothing of it is applied. The others meet in a
new process group, build the engine again, take over the newest state that they hold together (an
update may have been applied on some ranks and not on others), and run the same step again: the same
samples, shared out over fewer ranks. Whatever was left to do after the last step, such as an
evaluation, is done again, too. If they do not hold a whole state any more, they return to the
newest checkpoint.

A spare process that takes the place of a dead rank is given the same state. If it is ready when the
rank dies, it joins in the same meeting, and otherwise at the end of a step.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from .. import lost_ranks
from ..checkpoint.background import background_finished
from ..data.prebatched import Batches
from ..kernel.contract import Session
from ..kernel.errors import CapabilityRefused, CollectiveFailed, SettingError
from ..kernel.events import Event, Request, Requests, Warned
from ..kernel.loop import TrainLoop
from ..kernel.optional import HoldsParts, LeavesRanks
from ..kernel.paths import Url, place
from ..kernel.recipe import Recipe
from ..rank_launcher import RankLauncher
from .gc_frozen import freeze
from .handover import Handover, Position, hand_over, newest_held, positions
from .losses_kept import continue_window, note, note_begun_steps
from .saves import stored_metrics
from .settings import Settings

if TYPE_CHECKING:
    from .run import Run

__all__ = ["RankLost", "Recovery", "Reformed", "Rejoined", "launcher_for"]

IN_PLACE = "in_place"


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
class Rejoined(Event):
    """Spare processes have taken the places of ranks that died."""

    step: int
    """Number of steps done."""
    ranks: tuple[int, ...]
    """The numbers that these processes were started with."""
    world_size: int


@dataclass(frozen=True)
class Reformed(Event):
    """All ranks have the state of the last step, and continue."""

    step: int
    world_size: int
    seconds: float
    """Time in which training stood still, from the report of the change on."""
    parts: Mapping[str, float]
    """These seconds, by what they were spent on."""
    steps_back: int = 0
    """Number of steps that are made again, since a part of the state was lost with its ranks."""


class _SentRequests(Requests):
    """Requests of this rank, which remembers those that were sent with the last two steps: a step
    that is abandoned takes them along."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: list[Sequence[float]] = []

    def send(self) -> Sequence[float]:
        if lost_ranks.spare_waits():
            self.ask(Request.JOIN)
        sent = super().send()
        if any(sent) or self._sent:
            self._sent = [*self._sent[-1:], sent]
        return sent

    def ask_again(self) -> None:
        """Ask again for all that was sent lately. What was done already is done once more."""
        for request in Request:
            if request < Request.WRITTEN and any(sent[request] for sent in self._sent):
                self.ask(request)
        self._sent.clear()


class _RanksJoin(Exception):
    """Ends the attempt of a rank that has come to the end of a step at which others join."""


class Recovery:
    """Continues one call of `fit` without the ranks that die, and with those that join."""

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
        self._returned: _Returned | None = None
        """The state that the ranks are returning to."""
        self._reached = 0
        """Steps that the ranks had done when one died."""
        self._unfreeze: Callable[[], None] = lambda: None
        self._changed = False
        """True from a change of the ranks until the next step."""
        self._lost: tuple[int, ...] = ()
        self._joined: tuple[int, ...] = ()
        """The ranks that have died, and joined, since the last step."""
        self._since, self._parts = 0.0, dict[str, float]()
        self._unlogged: Mapping[str, float] = {}
        """The seconds of each part of the steps since the last log."""
        if self.is_on:
            _check(recipe, settings)
            self._unfreeze = freeze()  # a run that is replaced is collected in no time
        elif settings.max_lost is not None or settings.spares:
            name = "spares" if settings.spares else "max_lost"
            raise SettingError(
                f"{name} is {getattr(settings, name)}, and recover is {settings.recover!r}: set "
                f"recover=in_place, or leave {name} out"
            )

    def await_place(self) -> None:
        """Wait until this process is one of the ranks, if it is a spare."""
        if not self.is_on:
            return
        if lost_ranks.is_spare():
            torch.compiler.reset()  # imports what the first step would, which takes a second
        if lost_ranks.await_place():
            self._changed, self._since = True, time.perf_counter()

    def keep(self, run: Run) -> None:
        """Note that `run` has its state from now on, and holds it after each step."""
        if not self.is_on:
            return
        self._run, self._members, self._returned = run, lost_ranks.members(), None
        engine = run.loop.engine
        if not (isinstance(engine, HoldsParts) and isinstance(run.session, LeavesRanks)):
            raise CapabilityRefused(
                "recover=in_place",
                run.driver.name,
                "its ranks cannot continue in their processes: take a backend whose ranks can, or "
                "leave it out, and start the run again with --resume auto when a rank has died",
            )
        if self._changed:
            gc.collect()  # the run before, with its model, and the threads of its process group
            step, size = max(self._reached, run.loop.progress.step), run.session.world.size
            joined = tuple(each for each in self._joined if each not in self._lost)
            if self._lost:
                run.announce(RankLost(step, self._lost, size - len(joined)))
            if joined:
                run.announce(Rejoined(step, joined, size))
        part, size = engine.part(), run.session.world.size
        if part is not None and 1 < size == part[1]:
            run.announce(
                Warned(
                    f"each of the {size} ranks holds a part of the state that no other holds: when "
                    "one dies, the others return to the newest checkpoint"
                )
            )
        run.policy.outlives = self
        note_begun_steps(run.loop)
        self.ended(run.loop)

    def close(self) -> None:
        """Hold nothing any more, at the end of `fit`."""
        self.drop()
        self._unfreeze()

    def drop(self) -> None:
        """Hold no state any more: the run starts again from a checkpoint of its own."""
        self._run = None

    def ended(self, loop: TrainLoop) -> None:
        """See `OutlivesRanks`. Keep what the next step changes before its update."""
        assert isinstance(loop.engine, HoldsParts)
        self._kept_step = loop.progress.step
        self._random = loop.session.rng_state()
        loop.engine.begin_step()
        note(loop)

    def admit(self, loop: TrainLoop) -> NoReturn:
        """See `OutlivesRanks`."""
        self.ended(loop)  # an evaluation may have drawn random numbers
        loop.session.exchange(None)  # from here on no rank is inside the step
        lost_ranks.admit()
        raise _RanksJoin

    def continues_after(self, error: Exception) -> bool:
        """Return True if `error` was caused by a change of the ranks: train again then, with the
        state that is held. This process has its new rank from then on."""
        if not self.is_on or not lost_ranks.await_new():
            return False
        if not self._changed:
            self._changed = True
            self._since, self._parts = time.perf_counter(), {}
            self._unlogged = {} if self._run is None else self._run.policy.clock.take()
        with background_finished():
            pass  # what a thread still writes is not committed, and removed
        while changes := lost_ranks.renumber():
            self._lost += tuple(number for kind, number in changes if kind == "lost")
            self._joined += tuple(number for kind, number in changes if kind == "joined")
        if (run := self._run) is not None:
            assert isinstance(run.session, LeavesRanks)
            if run.session.world.size > 1 and self._kept_step != run.loop.progress.step:
                self.ended(run.loop)  # ranks met between the update and the end of it
            run.session.leave()
        if isinstance(self.requests, _SentRequests):
            self.requests.ask_again()
        most = self.settings.max_lost
        if most is not None and lost_ranks.num_missing() > most:
            self.requests.ask(Request.PREEMPT)
        self._spent("noticing")
        return True

    def shared(self, session: Session, resume: _Source) -> Handover | _Returned | None:
        """Return the state to continue with, once the ranks have met again; None if there is none,
        and the run begins as it did. `resume`: the state with which it began. Called by all
        ranks."""
        if not lost_ranks.generation():
            return None
        self._spent("meeting")
        own = None if (run := self._run) is None else Position.of(run, self._lost, self._joined)
        known = positions(session, own)
        begun = [each for each in known if each is not None]
        if not begun:
            self._returned = self._return_of_all(session)
            return self._returned
        if self._run is None:
            newest = max(begun, key=lambda each: each.step)
            self._lost, self._joined = tuple(newest.lost), tuple(newest.joined)
        self._reached = max(each.step for each in begun)
        if holders := newest_held(known):
            handed = hand_over(session, self._run, known, holders, self._members)
            self._spent("passing the state on")
            return handed
        self._run = None
        last = max(begun, key=lambda each: each.num_saved)
        source = place(last.checkpoint) if last.checkpoint else resume
        self._returned = _Returned(source, last.num_saved)
        return self._returned

    def _return_of_all(self, session: Session) -> _Returned | None:
        """Return the state that the ranks were returning to when they changed once more; None if
        none of them had begun."""
        mine, has_joined = self._returned, lost_ranks.own_number() in lost_ranks.joined()
        source = None if mine is None or mine.source is None else str(mine.source)
        known = session.exchange([has_joined, mine and [source, mine.num_saved]])
        if all(has_joined and returning is None for has_joined, returning in known):
            raise CollectiveFailed(
                "all ranks that had the state of the run have died, and the spares that have taken "
                "their places cannot know it: start the run again with --resume auto"
            )
        states = [returning for _, returning in known if returning is not None]
        return _Returned(*states[0]) if states else None

    def restore(self, run: Run, shared: Handover | _Returned) -> None:
        """Give the state to a run that was built again. Called by all ranks."""
        self._spent("building")
        if isinstance(shared, _Returned):
            where = shared.source or "its beginning"
            self._notes = [f"the ranks that are left lack a part of the state: back to {where}"]
            if shared.source is not None:
                run.resume(shared.source)
            if run.policy.saves is not None:
                run.policy.saves.num_saved = shared.num_saved
            self._spent("restoring")
            return
        before = self._run
        manifest, _ = run.policy.restore(run.loop, place(shared.path))
        step = run.first_step = run.loop.progress.step
        if before is not None:
            run.session.set_rng_state(self._random)
        else:  # the numbers that ranks were started with are all different
            run.session.seed(self.settings.seed + 1 + lost_ranks.own_number() + step)
        continue_window(run.loop, None if before is None else before.loop, shared.newest.grad_norm)
        for group, rate in zip(run.loop.engine.param_groups, shared.newest.rates, strict=True):
            group["lr"] = rate
        run.state.evaluations.restore(stored_metrics(manifest.state, str(shared.path)), step)
        self._notes = shared.notes
        shared.newest.give_to(run)
        shared.remove(run.session)
        self._spent("restoring")

    def begin(self, loop: TrainLoop) -> None:
        """See `OutlivesRanks`. After a change, announce it, and do what is due after the step that
        was restored."""
        run = self._run
        if run is None or not self._changed:
            return
        self._spent("checking")
        step, size, parts = loop.progress.step, loop.session.world.size, dict(self._parts)
        seconds = sum(parts.values())
        run.announce(Reformed(step, size, seconds, parts, max(0, self._reached - step)))
        loop.window.leave_out(seconds)
        run.policy.clock.take()
        run.policy.clock.add(self._unlogged)
        for text in self._notes:
            run.announce(Warned(text))
        self._changed, self._lost, self._joined = False, (), ()
        run.policy.act(loop, run.policy.take_due(loop), [0.0] * len(Request))

    def _spent(self, part: str) -> None:
        now = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._since
        self._since = now


_Source = str | os.PathLike[str] | Url | None
"""The values that `resume` may have."""


@dataclass(frozen=True)
class _Returned:
    """The state that all ranks return to: that of a checkpoint, or of the beginning."""

    source: _Source
    num_saved: int


def launcher_for(settings: Settings, nproc: int) -> RankLauncher | None:
    """Return what starts the ranks of a run that continues without ranks that die; None where
    the run ends with the first of them."""
    return RankLauncher(nproc, settings.spares) if settings.recover == IN_PLACE else None


def _check(recipe: Recipe, settings: Settings) -> None:
    """Raise an error if this run cannot continue without a rank."""
    if not lost_ranks.is_reported():
        raise SettingError(
            "recover=in_place needs a launcher that reports dead ranks: start several ranks on one "
            "machine by `drivetrain train RECIPE.py --nproc N --set recover=in_place`, or leave it "
            "out, and start the run again with --resume auto when a rank has died"
        )
    spares = int(os.environ.get(lost_ranks.SPARES, "0"))
    if settings.spares != spares:
        raise SettingError(
            f"spares is {settings.spares}, and the launcher keeps {spares} processes ready: it "
            "does not read the recipe file, so give --set spares=N on the command line"
        )
    if isinstance(recipe.train_data, Batches):
        raise SettingError(
            "recover=in_place shares the samples of a dead rank out over the others, and a "
            "loader in Batches gives each rank samples of its own: give a data set, or leave "
            "recover out"
        )

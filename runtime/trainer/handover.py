"""The state that ranks hand over to each other when one of them has died (`recovery`).

Each part of it comes from a rank that holds it, through a checkpoint in memory, so that it is
restored, and checked, like any other.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import lost_ranks
from ..checkpoint import CheckpointStore
from ..kernel.contract import Session
from ..kernel.errors import SaveFailed
from ..kernel.optional import HoldsParts
from ..kernel.paths import place
from ..kernel.shards import Piece
from .due import Due
from .losses_kept import losses_of_all

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Handover", "Position", "hand_over", "newest_held", "positions"]


@dataclass(frozen=True)
class Handover:
    """The state that all ranks take over."""

    path: Path
    newest: Position
    """The position of a rank that has the state."""
    notes: Sequence[str]
    """Notes on what it lacks."""

    def remove(self, session: Session) -> None:
        """Remove it from memory, once all ranks have read it. Called by all ranks."""
        session.exchange(None)
        if session.world.rank == 0:
            shutil.rmtree(self.path.parent)


@dataclass(frozen=True)
class Position:
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
    part: tuple[int, int] | None
    """See `HoldsParts`."""
    saved: bool
    """True if the checkpoint of the step exists."""
    checkpoint: str
    """The newest one; empty if there is none."""
    num_saved: int
    error: str
    """Why the last save failed."""
    loss: float
    metrics: dict[str, dict[str, float]]
    """The last logged loss, and the latest metrics of each data set."""
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    """The ranks that have died, and joined, since the last step."""

    @classmethod
    def of(cls, run: Run, lost: tuple[int, ...], joined: tuple[int, ...]) -> Position:
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
            loop.engine.part() if isinstance(loop.engine, HoldsParts) else None,
            saves is not None and saves.holds(progress.step),
            "" if checkpoint is None else str(checkpoint),
            0 if saves is None else saves.num_saved,
            "" if saves is None else saves.error,
            run.state.loss,
            run.state.evaluations.metrics,
            lost,
            joined,
        )

    def give_to(self, run: Run) -> None:
        """Let a run that was built again know what this rank knew: alike on all ranks."""
        run.policy.resumed_from = place(self.checkpoint) if self.checkpoint else None
        run.policy.set_due(run.loop, Due(*self.due))
        if (saves := run.policy.saves) is not None:
            saves.mark_saved(self.step if self.saved else -1)
            saves.num_saved, saves.error = self.num_saved, self.error
        run.state.loss, run.state.evaluations.metrics = self.loss, self.metrics

    def to_json(self) -> list[Any]:
        """Return the fields (JSON types)."""
        return list(dataclasses.astuple(self))


def positions(session: Session, own: Position | None) -> list[Position | None]:
    """Return how far each rank has come; None for one whose run has not begun. Called by all
    ranks."""
    known = session.exchange(None if own is None else own.to_json())
    return [each and Position(*each) for each in known]


def newest_held(known: Sequence[Position | None]) -> dict[int, int]:
    """Return for each part of the newest state that the ranks hold together the first rank that
    holds it; empty if they hold none."""
    held: dict[tuple[int, int], dict[int, int]] = {}
    for rank, each in enumerate(known):
        if each is not None and each.part is not None:
            part, num_parts = each.part
            held.setdefault((each.step, num_parts), {}).setdefault(part, rank)
    whole = [key for key, parts in held.items() if len(parts) == key[1]]
    return held[max(whole)] if whole else {}


def hand_over(
    session: Session,
    run: Run | None,
    known: Sequence[Position | None],
    holders: Mapping[int, int],
    members: Sequence[int],
) -> Handover:
    """Write the state of these holders (`newest_held`) to a checkpoint in memory. Called by all
    ranks, with the run whose state each holds, and the numbers that the ranks of it were launched
    with."""
    source, rank = holders[0], session.world.rank
    newest = known[source]
    assert newest is not None
    what, notes, failed = dict[str, Any](), list[str](), ""
    root = lost_ranks.shared_folder()
    try:
        if rank == 0:
            for before in root.iterdir():  # of ranks that died meanwhile
                shutil.rmtree(before)
        if run is not None and rank in holders.values():
            what = run.state.to_save(run.loop)
            alike = [each for each in known if each is not None and each.step == newest.step]
            notes = _add_losses(what["state"], run, newest, alike, members)
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    described = None
    if run is not None and rank == source:
        described = [what[name] for name in ("state", "settings", "driver")]
    answers = session.exchange([failed, described, notes, run and run.loop.engine.tied])
    if failures := [answer[0] for answer in answers if answer[0]]:
        raise SaveFailed(f"the state could not be passed on in memory: {failures[0]}")
    _, (state, settings, driver), notes, tied = answers[source]
    engine: Any = _Held(run if rank in holders.values() else None, tied)
    path = CheckpointStore(root / str(lost_ranks.generation())).save(
        newest.step, engine, session, state, settings=settings, driver=driver
    )
    return Handover(Path(str(path)), newest, notes)


class _Held:
    """The engine of a rank that has left the others, as a checkpoint sees it."""

    def __init__(self, run: Run | None, tied: Sequence[Sequence[str]]) -> None:
        """`run`: None on a rank that hands nothing over."""
        self.tied = tuple(map(tuple, tied))
        self._run = run

    def shards(self) -> Iterator[Piece]:
        """Yield what this rank hands over."""
        if self._run is not None:
            engine = self._run.loop.engine
            assert isinstance(engine, HoldsParts)
            yield from engine.held()


def _add_losses(
    state: dict[str, Any],
    run: Run,
    newest: Position,
    alike: Sequence[Position],
    members: Sequence[int],
) -> list[str]:
    """Add to the state the losses of all ranks since the last log. Return notes on those that are
    not known."""
    if newest.first_step == newest.step:
        return []
    notes = []
    there = {each.number: each.losses for each in alike}
    losses, missing = losses_of_all(newest.step, newest.first_step, there, members)
    state["window"]["losses"] = losses
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
    return notes

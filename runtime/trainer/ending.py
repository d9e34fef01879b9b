"""The part of a run after its last step. A failure there costs no training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..data.user_frames import user_frames
from ..kernel.contract import Session
from ..kernel.errors import CollectiveFailed, FailedAfterTraining
from ..kernel.paths import Place
from .announce import Announcer
from .recipe_checks import in_words, output_is_gone
from .saves import Saves

__all__ = ["Ending", "sentences"]

T = TypeVar("T")


class Ending:
    """Runs what follows the last step of a run, once the step is saved. An error is kept, so that
    the rest is done, too, and raised at the end. All ranks call every method in the same order.

    `all_failed` returns whether all ranks raised this error, so that they can continue together.
    The other arguments are what `sentences` returns.
    """

    def __init__(
        self,
        session: Session,
        announce: Announcer,
        all_failed: Callable[[Exception | SystemExit], bool],
        saved: str,
        remedy: str,
        checkpoint: str,
    ) -> None:
        self.session, self.announce, self.all_failed = session, announce, all_failed
        self.saved, self.remedy, self.checkpoint = saved, remedy, checkpoint
        self.error: BaseException | None = None
        """The first error."""
        self._what = ""

    def attempt(self, what: str, act: Callable[[], T]) -> T | None:
        """Return the result of `act`; None if it raised on all ranks. Raises `FailedAfterTraining`
        at once if it raised on some ranks alone: they cannot continue together."""
        try:
            return act()
        except (Exception, SystemExit) as error:
            if output_is_gone(error):
                raise
            if isinstance(error, CollectiveFailed) or not self.all_failed(error):
                raise self._failed(f"{what} failed: {in_words(error)}") from error
            if self.error is None:
                self.error, self._what = error, what
            return None

    def close(self, preempted: bool) -> None:
        """Raise `FailedAfterTraining` on all ranks if anything failed on one of them, also in an
        observer. If `preempted`, raise what an observer of this rank raised: the run is not at its
        end."""
        error, what = self.error, self._what
        if error is None:
            error, what = self.announce.error, self.announce.failed
        if preempted:
            self.announce.raise_errors()
        mine = "" if error is None else f"{what} failed: {in_words(error)}"
        reports = self.session.exchange([mine, "" if error is None else user_frames(error)])
        failed = [rank for rank, (report, _) in enumerate(reports) if report]
        if failed and error is not None:
            raise self._failed(mine) from error
        if failed:  # on other ranks alone: show what they would show
            report, frames = reports[failed[0]]
            message = f"{self._failed(f'rank {failed[0]}: {report}')}\n{frames}".rstrip()
            raise FailedAfterTraining(message, self.checkpoint)

    def _failed(self, why: str) -> FailedAfterTraining:
        return FailedAfterTraining(f"{self.saved}; then {why}. {self.remedy}", self.checkpoint)


def sentences(
    reason: str, step: int, out: Place | None, saves: Saves | None, checkpoint: Place | None
) -> tuple[str, str, str]:
    """Return where the weights of the last step are, what to do after an error, and the place as
    text. `checkpoint`: the newest one that this run saved or resumed from."""
    newest = f"the newest checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint"
    remedy = "`drivetrain evaluate` measures a checkpoint when the cause is gone"
    if saves is None or out is None:
        where = "nothing is saved, since fit was given no out"
        remedy, checkpoint = "Give out, and what was trained is kept", None
    elif saves.holds(step) and checkpoint:
        where = f"saved in {checkpoint}"
        if reason == "finished":
            remedy = "When the cause is gone, --resume auto does the rest: no step is left to train"
    elif saves.error:
        where = f"not saved ({saves.error}); {newest}"
    else:
        where = f"not saved, since checkpoint.at_end is false; {newest}"
    return f"{reason} at step {step}, {where}", remedy, str(checkpoint or "")

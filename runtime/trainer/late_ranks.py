"""Ranks that keep others waiting: the events that report them, and the error and records when a
rank never arrives."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import cast

from .. import lost_ranks
from ..checkpoint import storage_of
from ..data.user_frames import last_line
from ..kernel.contract import Session
from ..kernel.errors import CollectiveFailed, FailedAfterTraining
from ..kernel.events import Event, RankLate, Warned
from ..kernel.optional import WatchesRanks
from ..kernel.paths import Place
from ..kernel.plan import Capabilities
from ..registry import REQUIRED_LIMITS

__all__ = [
    "abort_ranks",
    "ended_by",
    "flight_records_kept",
    "propagate_errors",
    "report_late_ranks",
]


def report_late_ranks(
    session: Session,
    driver: str,
    able: Capabilities,
    announce: Callable[[Event], None],
    steps_done: Callable[[], int],
) -> None:
    """Announce late ranks, and each time limit that the driver does not enforce."""
    for name in REQUIRED_LIMITS:
        if not getattr(able, name):
            announce(Warned(f"backend {driver!r} does not keep {name}"))
    if able.stall_seconds:
        watching = cast(WatchesRanks, session)
        watching.watch(lambda *late: announce(RankLate(steps_done(), *late)))


@contextlib.contextmanager
def propagate_errors(session: Session, able: Capabilities) -> Iterator[None]:
    """Send the error that ends this rank to the other ranks, which end, too, and quote it in their
    own error."""
    try:
        yield
    except (CollectiveFailed, FailedAfterTraining):
        raise  # caused by another rank's error, which was sent already, or sent by `Ending`
    except (Exception, SystemExit) as error:
        if lost_ranks.is_new():
            raise  # the others continue, and so may this one
        abort_ranks(session, able, ended_by(session.world.rank, error), retry=False)
        raise


def abort_ranks(session: Session, able: Capabilities, why: str, retry: bool) -> bool:
    """Report to the other ranks that this rank cannot continue (see `WatchesRanks`). Return True if
    this rank may retry: all ranks reported the same, or no other rank watches it."""
    if session.world.size == 1 or not able.stall_seconds:
        return True
    return cast(WatchesRanks, session).abort(why, retry)


def ended_by(rank: int, error: BaseException) -> str:
    """Return the report of a rank's error to the other ranks: its first line."""
    return f"rank {rank} ended by {last_line(error).splitlines()[0]}"


@contextlib.contextmanager
def flight_records_kept(folder: Place | None) -> Iterator[None]:
    """Write `flight-records-rank-N.json` into `folder` if the block raises `CollectiveFailed`, the
    communication library recorded anything, and the disk has room."""
    try:
        yield
    except (CollectiveFailed, FailedAfterTraining) as error:
        records = getattr(error, "records", "") or getattr(error.__cause__, "records", "")
        if folder is not None and records:
            name = f"flight-records-rank-{os.environ.get('RANK', '0')}.json"
            with contextlib.suppress(OSError):
                storage_of(folder).replace(folder / name, records.encode())
        raise

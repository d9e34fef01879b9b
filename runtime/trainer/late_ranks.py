"""Ranks that keep others waiting: the events that announce them, and what is told and kept when one
never comes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import cast

from ..checkpoint import storage_of
from ..data.user_frames import last_line
from ..kernel.contract import Session, WatchesRanks
from ..kernel.errors import CollectiveFailed
from ..kernel.events import Event, RankLate, Warned
from ..kernel.paths import Place
from ..kernel.plan import Capabilities
from ..kernel.registry import DUTIES

__all__ = ["ended_by", "flight_records_kept", "give_up", "hear_of_late_ranks", "others_told"]


def hear_of_late_ranks(
    session: Session,
    driver: str,
    able: Capabilities,
    announce: Callable[[Event], None],
    steps_done: Callable[[], int],
) -> None:
    """Announce ranks that are late, and which limits of time the driver does not keep."""
    for name in DUTIES:
        if not getattr(able, name):
            announce(Warned(f"backend {driver!r} does not keep {name}"))
    if able.stall_seconds:
        watching = cast(WatchesRanks, session)
        watching.watch(lambda *told: announce(RankLate(steps_done(), *told)))


@contextlib.contextmanager
def others_told(session: Session, able: Capabilities) -> Iterator[None]:
    """While it is open, an error that ends this rank ends the others, too, and stands in theirs."""
    try:
        yield
    except CollectiveFailed:
        raise  # another rank's error is behind it
    except (Exception, SystemExit) as error:
        give_up(session, able, ended_by(session.world.rank, error), retry=False)
        raise


def give_up(session: Session, able: Capabilities, why: str, retry: bool) -> bool:
    """See `WatchesRanks`; True where nobody hears it."""
    if session.world.size == 1 or not able.stall_seconds:
        return True
    return cast(WatchesRanks, session).give_up(why, retry)


def ended_by(rank: int, error: BaseException) -> str:
    """What the others are told of a rank's error: its first line."""
    return f"rank {rank} ended by {last_line(error).splitlines()[0]}"


@contextlib.contextmanager
def flight_records_kept(folder: Place | None) -> Iterator[None]:
    """While it is open, a `CollectiveFailed` leaves `flight-records-rank-N.json` there, if the
    library has noted anything, and there is room."""
    try:
        yield
    except CollectiveFailed as error:
        if folder is not None and error.records:
            name = f"flight-records-rank-{os.environ.get('RANK', '0')}.json"
            with contextlib.suppress(OSError):
                storage_of(folder).replace(folder / name, error.records.encode())
        raise

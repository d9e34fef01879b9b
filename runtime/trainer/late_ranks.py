"""Ranks that live and keep others waiting: who watches for them, and who hears of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from ..kernel.contract import Session, WatchesRanks
from ..kernel.events import Event, RankLate, Warned
from ..kernel.plan import Capabilities
from ..kernel.registry import DUTIES

__all__ = ["hear_of_late_ranks"]


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

"""Updates that an engine shows: to several observers, and which parts of them a rank counts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from torch import Tensor

from ..kernel.contract import Session
from ..kernel.optional import ShowsUpdates, UpdateObserver
from ..kernel.plan import Parts

__all__ = ["CountedParts", "SharedUpdates", "shared"]


def shared(engine: object) -> object:
    """Return an object that shows the engine's updates to several observers, if it shows any."""
    return SharedUpdates(engine) if isinstance(engine, ShowsUpdates) else engine


class SharedUpdates:
    """Shows each update of an engine to all that have asked for it; see `ShowsUpdates`."""

    def __init__(self, engine: ShowsUpdates) -> None:
        self._engine = engine
        self._observers: list[UpdateObserver] = []
        self._is_shown = False

    @property
    def runs_all_modules(self) -> bool:
        """See `ShowsUpdates`."""
        return self._engine.runs_all_modules

    def show_update(self, observer: UpdateObserver | None) -> None:
        """Show the next `update` to one observer more; None: to nobody. Raises
        `CapabilityRefused`, also for None, if the engine cannot."""
        if self._is_shown or observer is None:
            self._observers, self._is_shown = [], False
        if observer is not None:
            self._observers.append(observer)
        self._engine.show_update(self if self._observers else None)

    def weights(self, parts: Parts) -> None:
        """See `UpdateObserver`."""
        self._is_shown = True
        for observer in self._observers:
            observer.weights(parts)

    def gradients(self, parts: Mapping[str, Tensor]) -> None:
        """See `UpdateObserver`."""
        for observer in self._observers:
            observer.gradients(parts)


class CountedParts:
    """The parameters whose elements this rank counts: of several ranks that hold the same elements
    of a parameter, one."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._held: list[tuple[str, int]] | None = None
        self.names: Sequence[str] = ()
        """All parameters, by the same names in the same order on all ranks."""
        self.own = frozenset[str]()
        """The parameters that this rank counts."""

    def choose(self, parts: Parts) -> None:
        """Choose them, for parts of weights. Called by all ranks; they meet when parts change."""
        held = [(_key(name, key), part.numel()) for name, (part, key) in parts.items()]
        if held == self._held:
            return
        self.names, self._held = [*parts], held
        world = self._session.world
        everyones = self._session.exchange(held) if world.size > 1 else [held]
        names = dict(zip(parts, zip(*everyones, strict=True), strict=True))
        self.own = frozenset(_shared_out(names, world.size)[world.rank])


def _shared_out(parts: Mapping[str, Sequence[tuple[str, int]]], num_ranks: int) -> list[list[str]]:
    """Return by rank the names of the parts that it counts, so that the one with the most elements
    has few. `parts`: for each name what the ranks hold, as key and number of elements."""
    counted: list[list[str]] = [[] for _ in range(num_ranks)]
    elements = [0] * num_ranks
    for name, held in sorted(parts.items(), key=lambda each: -max(count for _, count in each[1])):
        holders: dict[str, list[int]] = {}
        for rank, (key, count) in enumerate(held):
            if count:
                holders.setdefault(key, []).append(rank)
        for ranks in holders.values():
            chosen = min(ranks, key=elements.__getitem__)
            elements[chosen] += held[chosen][1]
            counted[chosen].append(name)
    return counted


def _key(name: str, key: object) -> str:
    """Return a short text that is equal on ranks that hold the same elements."""
    return hashlib.blake2b(f"{name}/{key}".encode(), digest_size=8).hexdigest()

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
        self._keys: list[str] | None = None
        self.names: Sequence[str] = ()
        """All parameters, by the same names in the same order on all ranks."""
        self.own = frozenset[str]()
        """The parameters that this rank counts."""

    def choose(self, parts: Parts) -> None:
        """Choose them, for parts of weights. Called by all ranks; they meet when parts change."""
        world = self._session.world
        keys = [_key(name, key) if part.numel() else "" for name, (part, key) in parts.items()]
        if keys == self._keys:
            return
        self.names, self._keys = [*parts], keys
        everyones = self._session.exchange(keys) if world.size > 1 else [keys]
        own = set[str]()
        for turn, (name, key, *held) in enumerate(zip(parts, keys, *everyones, strict=True)):
            ranks = [rank for rank, other in enumerate(held) if other == key]
            if key and ranks[turn % len(ranks)] == world.rank:
                own.add(name)
        self.own = frozenset(own)


def _key(name: str, key: object) -> str:
    """Return a short text that is equal on ranks that hold the same elements."""
    return hashlib.blake2b(f"{name}/{key}".encode(), digest_size=8).hexdigest()

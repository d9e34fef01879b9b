"""The first microbatch of a run, read before the loop starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice

from ..kernel.batches import Group, Groups, Microbatch, Position

__all__ = ["ReadAhead"]


class ReadAhead:
    """`Groups` of which `first` reads one microbatch before the loop asks for it. The loop receives
    every microbatch once, and iterates over the others without a call of this module."""

    def __init__(self, data: Groups) -> None:
        self.data = data
        self._begun: _Begun | None = None

    def first(self, start: Position, num_steps: int) -> Microbatch | None:
        """Return the first microbatch; None if there is no data. The next call of `groups` must
        have the same arguments."""
        groups = self.data.groups(start, num_steps)
        found = [*islice(groups, 1)]
        parts = [*islice(found[0].microbatches, 1)] if found else []
        read = (each._replace(microbatches=chain(parts, each.microbatches)) for each in found)
        self._begun = _Begun(read, groups)
        self._begun.close = groups.close  # type: ignore[attr-defined]
        return parts[0] if parts else None

    def groups(self, start: Position, num_steps: int) -> Iterator[Group]:
        """See `Groups`."""
        begun, self._begun = self._begun, None
        return self.data.groups(start, num_steps) if begun is None else begun

    def close(self) -> None:
        """End the reading if the loop has not taken it over."""
        if self._begun is not None:
            self._begun.close()


class _Begun(chain[Group]):
    """An iterator over groups with the `close` of a generator."""

    close: Callable[[], None]

"""A begun epoch, which any run finishes in the order in which it was begun.

The size of the data, the seed, the batch or the lengths of samples may have changed meanwhile.
Still no sample comes twice in an epoch, and no existing sample is left out. So a checkpoint holds
everything that determines the order of its epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from .order import (
    READ_AT_ONCE,
    ByLength,
    Order,
    OrderFunction,
    ReadAhead,
    Sorted,
    sequential,
    shuffled,
)

__all__ = ["BegunEpoch", "PresentSamples"]

_COUNTED_AT_ONCE = 1 << 17


@dataclass(frozen=True)
class BegunEpoch:
    """The order of a begun epoch, which is finished in that order whatever has changed since.

    A sample is identified by its index: new samples have larger indices than old ones.
    """

    epoch: int
    start: int
    """The number of samples that were consumed."""
    length: int
    """Length of the data when the epoch began."""
    seed: int
    shuffled: bool
    rest: Sequence[int] = ()
    """The next samples, if they depend on more than the seed (on the lengths of samples)."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON for the manifest of a checkpoint, which holds the position, too."""
        stored = asdict(self)
        return {name: stored[name] for name in ("length", "seed", "shuffled", "rest")}

    @classmethod
    def from_json(cls, epoch: int, start: int, value: Any) -> BegunEpoch:
        """Raises `ValueError` for anything but what `to_json` returns."""
        match value:
            case {
                "length": int(length),
                "seed": int(seed),
                "shuffled": bool(),
                "rest": [*rest],
            } if (
                len(value) == 4
                and type(length) is type(seed) is int
                and start + len(rest) <= length
                and all(type(index) is int and 0 <= index < length for index in rest)
                and len(set(rest)) == len(rest)
            ):
                return cls(epoch, start, **value)
        raise ValueError(f"not an order of samples: {value!r:.200}")

    def order(self, by: OrderFunction) -> Order:
        """Return the order of the epoch. It is exact from `start` on; the consumed part may
        differ."""
        order = (shuffled if self.shuffled else sequential)(self.length, self.seed, self.epoch)
        if isinstance(by, ByLength):
            order = by.sort(order, self.seed, self.epoch, self.start + len(self.rest))
        return _Continued(order, self) if self.rest else order

    def later(self, start: int, order: Order) -> BegunEpoch:
        """Return the same epoch after `start` samples of this order were consumed."""
        rest: list[int] = torch.as_tensor(order[start : _stretch_end(order, start)]).tolist()
        return replace(self, start=start, rest=rest)


class _Continued:
    """An order whose next few samples are given."""

    def __init__(self, order: Order, begun: BegunEpoch) -> None:
        self.order, self._start = order, begun.start
        self._rest = torch.tensor(begun.rest)
        self._stop = begun.start + len(begun.rest)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, part: slice, /) -> Tensor:
        start, stop, step = part.indices(len(self))
        given = self._rest[max(start - self._start, 0) : max(stop - self._start, 0)]
        after = self.order[max(start, self._stop) : max(stop, self._stop)]
        return torch.cat((given, torch.as_tensor(after, dtype=torch.int64)))[::step]

    def stretch_end(self, start: int) -> int:
        """See `Sorted`."""
        return self._stop if start < self._stop else _stretch_end(self.order, start)


def _stretch_end(order: Order, start: int) -> int:
    return order.stretch_end(start) if isinstance(order, Sorted | _Continued) else start


class PresentSamples(ReadAhead):
    """An order of more samples than exist now: missing samples are skipped."""

    def __init__(self, order: Order, num_samples: int) -> None:
        super().__init__(order)
        self._num_samples = num_samples

    def read(self, start: int, first: int, last: int) -> list[int]:
        """See `ReadAhead`."""
        found = islice((index for _, index in self._present(start)), first, last)
        return list(found)

    def spans(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """See `ReadAhead`."""
        present = self._present(start)
        while span := list(islice(present, count)):
            yield span[0][0], len(span)

    def _present(self, start: int) -> Iterator[tuple[int, int]]:
        """Yield places and indices of existing samples, from `start` on."""
        for first in range(start, len(self), READ_AT_ONCE):
            size = min(READ_AT_ONCE, len(self) - first)
            for place, index in enumerate(super().read(first, 0, size), first):
                if index < self._num_samples:
                    yield place, index

    def count(self, start: int) -> int:
        """See `ReadAhead`. Takes half a minute for an order of 10^9 samples, and little memory."""
        parts = (
            torch.as_tensor(self.order[first : first + _COUNTED_AT_ONCE])
            for first in range(start, len(self), _COUNTED_AT_ONCE)
        )
        return sum(int((part < self._num_samples).sum()) for part in parts)

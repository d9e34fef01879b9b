"""The order of samples: a function of (seed, epoch) that can be opened at any position.

A shuffled order is never stored. It is a pseudo-random permutation of 0..n-1 that computes any
slice of itself in time and memory proportional to the slice, so that a billion samples are opened,
and a resumed run skips to its position, in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from math import isqrt
from typing import Protocol

import torch
from torch import Tensor

from ..kernel.errors import DataError

__all__ = [
    "READ_AT_ONCE",
    "ByLength",
    "Order",
    "OrderFunction",
    "ReadAhead",
    "Sorted",
    "mix",
    "sequential",
    "shuffled",
]

_NUM_ROUNDS = 8
_BY_LENGTH = 0x1E4674
_MASK_64 = 2**64 - 1
READ_AT_ONCE = 4096
"""Opening an order costs about as much as reading this many indices of it."""


class Order(Protocol):
    """The sample indices of one epoch, in the order in which they are trained on."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Sequence[int] | Tensor: ...


OrderFunction = Callable[[int, int, int], Order]
"""`order(num_samples, seed, epoch)`: a pure function, so that all ranks and resumed runs agree."""


def sequential(num_samples: int, seed: int, epoch: int) -> Order:
    """Return the order 0, 1, 2, ... in every epoch."""
    return range(num_samples)


def shuffled(num_samples: int, seed: int, epoch: int) -> Order:
    """Return a permutation that differs for every seed and epoch."""
    return _Permutation(num_samples, [mix(seed, epoch, r) % 2**32 for r in range(_NUM_ROUNDS)])


class ByLength:
    """An `OrderFunction` that puts samples of similar length together, in a shuffled order.

    The shuffled order is taken in stretches of `stretch` samples; each is sorted by length, split
    into `batch` samples at a time, and these are shuffled. A batch then needs hardly any padding,
    and an epoch still has every sample once.
    """

    def __init__(self, lengths: Sequence[int], batch: int, stretch: int) -> None:
        self.lengths = torch.as_tensor(lengths)
        self.batch, self.stretch = batch, -(-stretch // batch) * batch

    def __call__(self, num_samples: int, seed: int, epoch: int) -> Order:
        """See `OrderFunction`. Raises `DataError` if the number of lengths differs."""
        if len(self.lengths) != num_samples:
            raise DataError(f"there are {len(self.lengths)} lengths for {num_samples} samples")
        return self.sort(shuffled(num_samples, seed, epoch), seed, epoch)

    def sort(self, order: Order, seed: int, epoch: int, origin: int = 0) -> Sorted:
        """Sort the order within stretches by length; the first stretch begins at `origin`."""
        return Sorted(order, self, mix(seed, epoch, _BY_LENGTH), origin)

    def of(self, samples: Tensor) -> Tensor:
        """Return the lengths of samples; -1 for samples that no longer exist."""
        known = samples < len(self.lengths)
        return torch.where(known, self.lengths[samples.where(known, 0)], -1)


class Sorted:
    """The order of one epoch. Reading a slice sorts the stretches that it touches."""

    def __init__(self, order: Order, by: ByLength, seed: int, origin: int) -> None:
        self._order, self._by, self._seed, self._origin = order, by, seed, origin

    def stretch_end(self, start: int) -> int:
        """Return the end of the stretch that holds the sample before `start`."""
        return min(start + (self._origin - start) % self._by.stretch, len(self))

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, part: slice, /) -> Tensor:
        start, stop, step = part.indices(len(self))
        stretch = self._by.stretch
        first = start - (start - self._origin) % stretch
        if stop <= start:
            return torch.empty(0, dtype=torch.int64)
        whole = torch.cat([self._stretch(begin) for begin in range(first, stop, stretch)])
        return whole[start - first : stop - first : step]

    def _stretch(self, begin: int) -> Tensor:
        batch, stretch = self._by.batch, self._by.stretch
        chosen = torch.as_tensor(self._order[begin : begin + stretch])
        by_length = chosen[self._by.of(chosen).argsort(descending=True, stable=True)]
        full = len(chosen) // batch
        generator = torch.Generator().manual_seed(mix(self._seed, begin // stretch) >> 1)
        shuffle = torch.randperm(full, generator=generator)
        batches = by_length[: full * batch].view(full, batch)[shuffle]
        return torch.cat((batches.flatten(), by_length[full * batch :]))


def mix(*values: int) -> int:
    """Hash the values, and their order, to 64 well-distributed bits.

    The finaliser of SplitMix64 (Steele, Lea, Flood: https://doi.org/10.1145/2660193.2660195).
    """
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK_64
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return state


class _Permutation:
    """A generalised Feistel cipher on pairs of numbers below `side`, with cycle walking: what
    falls outside 0..n-1 is enciphered again until it falls inside. As side**2 is hardly more than
    n, that is rare.

    J. Black and P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002,
    https://doi.org/10.1007/3-540-45760-7_9
    """

    def __init__(self, num_samples: int, keys: list[int]) -> None:
        self._num_samples = num_samples
        # A cipher on a few values has few permutations: start at 4 * 4.
        self._side = max(4, isqrt(max(num_samples - 1, 0)) + 1)
        self._keys = keys

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, part: slice, /) -> Tensor:
        chosen = range(self._num_samples)[part]
        values = self._encipher(torch.arange(len(chosen)) * chosen.step + chosen.start)
        outside = (values >= self._num_samples).nonzero()
        while len(outside):
            walked = self._encipher(values[outside])
            values[outside] = walked
            outside = outside[walked >= self._num_samples].unsqueeze(1)
        return values

    def _encipher(self, values: Tensor) -> Tensor:
        left, right = values // self._side, values % self._side
        for key in self._keys:
            left, right = right, (left + _scramble(right ^ key)) % self._side
        return left * self._side + right


def _scramble(values: Tensor) -> Tensor:
    """Hash 32-bit numbers, so that products stay below 2**63.

    Constants: https://github.com/skeeto/hash-prospector ("two-round functions").
    """
    values = (values ^ (values >> 16)) * 0x21F0AAAD & 0xFFFFFFFF
    values = (values ^ (values >> 15)) * 0x735A2D97 & 0xFFFFFFFF
    return values ^ (values >> 15)


class ReadAhead:
    """An order that is read a few thousand indices at a time, for many small reads in a row."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self._start = self._stop = 0
        self._indices: list[int] = []

    def __len__(self) -> int:
        return len(self.order)

    def read(self, start: int, first: int, last: int) -> list[int]:
        """Return the indices of the samples `first`..`last-1`, counted from `start` on."""
        first, last = start + first, start + last
        if not self._start <= first <= last <= self._stop:
            end = min(max(last, first + READ_AT_ONCE), len(self))
            indices = self.order[first:end]
            self._indices = indices.tolist() if isinstance(indices, Tensor) else list(indices)
            self._start, self._stop = first, end
        return self._indices[first - self._start : last - self._start]

    def spans(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield the start and the size of each next `count` samples, from `start` on."""
        whole, rest = divmod(len(self) - start, count)
        sizes = chain(repeat(count, whole), (rest,))  # ends with a size of 0 if all are whole
        return zip(range(start, len(self), count), sizes, strict=False)

    def count(self, start: int) -> int:
        """Count the samples from `start` on."""
        return len(self) - start

"""A mixture of data sets by weight, whose draws follow from (seed, sample) alone.

The schedule in `shares.py` selects the source of each draw. The source's own shuffled order selects
its sample; after each pass it is shuffled again. A small source is repeated often, a large one
seldom, and neither depends on the other. So the order is the same at any world size, and any
position in it can be computed in microseconds, without counting.

Sources that can only be read from the front (streams) are mixed by the same schedule, and resume
from their own states.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..kernel.errors import DataError, DataFailed
from .indexed import is_indexed, length_of
from .order import mix, shuffled
from .positions import LARGEST
from .prebatched import Batches
from .shares import Shares, shares_of
from .user_frames import last_line

__all__ = ["Joined", "Mix", "MixOrder", "draw_indices", "fetched"]


class Mix:
    """Training data drawn from several sources: `Mix({"web": (web, 0.7), "code": (code, 0.3)})`.

    A source is data that can be indexed, which is shuffled, or a stream, in its own order. Weights
    are ratios of samples. `stages` change them: `[(100_000, {"code": 0.6})]` from sample 100,000 of
    the run on, and a source that is not named keeps its weight. `length`: samples in an epoch; by
    default the sum over all sources, or none if a source is a stream, so that the run must end by
    `steps`.

    Raises `DataError`, naming the source, for data that cannot be mixed.
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[Any, float]],
        *,
        stages: Sequence[tuple[int, Mapping[str, float]]] = (),
        length: int | None = None,
    ) -> None:
        for name, pair in dict[Any, Any](sources).items():
            if not isinstance(name, str) or not name:
                raise DataError(f"a source is called {name!r}; its name must be a text")
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise DataError(f"source {name!r} must be a pair (data, weight), not {pair!r:.100}")
        if not sources:
            raise DataError("a Mix of no sources: give it some, {name: (data, weight)}")
        self.data = {name: data for name, (data, _) in sources.items()}
        self.lengths = {name: _checked_length(name, data) for name, data in self.data.items()}
        self._stages = _stages({name: weight for name, (_, weight) in sources.items()}, stages)
        streams = [name for name, size in self.lengths.items() if size is None]
        if length is not None and streams:
            raise DataError(
                f"length is {length}, and source {streams[0]!r} is a stream: a Mix with streams "
                "has no epochs; leave length out, and set the steps of the run"
            )
        if length is not None and not 0 < length < LARGEST:
            raise DataError(f"length is {length}; an epoch must have at least 1 sample")
        self.streams = bool(streams)
        self.length = length or sum(size or 0 for size in self.lengths.values())

    def __len__(self) -> int:
        if self.streams:
            raise TypeError("a Mix with streams has no length")
        return self.length

    def drawn(self, samples: int) -> dict[str, int]:
        """Count the samples of each source among the first `samples` of a run."""
        counts = [0] * len(self.data)
        for stage in self._stages:
            inside = min(samples, stage.stop) - stage.start
            if inside > 0:
                counts = [a + b for a, b in zip(counts, stage.shares.counts(inside), strict=True)]
        return dict(zip(self.data, counts, strict=True))

    def epochs(self, samples: int) -> dict[str, float]:
        """Return the number of passes over each source of known length in the first `samples` of a
        run."""
        drawn = self.drawn(samples)
        return {name: drawn[name] / size for name, size in self.lengths.items() if size}

    def sources(self, first: int, stop: int) -> Tensor:
        """Return the source number of each of these samples, counted from the start of the run."""
        parts = [
            stage.shares.sources(max(first, stage.start) - stage.start, end - stage.start)
            for stage in self._stages
            if (end := min(stop, stage.stop)) > max(first, stage.start)
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def order(self, num_samples: int, seed: int, epoch: int) -> MixOrder:
        """Return the order of an epoch over the samples of all sources, as `Joined` numbers them;
        an `OrderFunction`."""
        return MixOrder(self, seed, epoch * self.length)


class MixOrder:
    """The draws of one epoch, as indices into `Joined`. `first`: number of draws before the
    epoch."""

    def __init__(self, mixture: Mix, seed: int, first: int) -> None:
        self.mixture, self.seed, self.first = mixture, seed, first

    def __len__(self) -> int:
        return self.mixture.length

    def __getitem__(self, part: slice, /) -> Tensor:
        start, stop, step = part.indices(len(self))
        first, stop = self.first + start, self.first + max(start, stop)
        numbers, before = self.mixture.sources(first, stop), self.mixture.drawn(first)
        found, offset = torch.empty_like(numbers), 0
        for number, (name, size) in enumerate(self.mixture.lengths.items()):
            assert size is not None, "streams have no order"
            places = (numbers == number).nonzero().squeeze(1)
            seed = mix(self.seed, *name.encode())
            found[places] = offset + draw_indices(size, seed, before[name], len(places))
            offset += size
        return found[::step]


class Joined:
    """The samples of all sources of a mixture, one source after the other."""

    def __init__(self, mixture: Mix) -> None:
        self._data = mixture.data
        self._starts = list(accumulate((size or 0 for size in mixture.lengths.values()), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        name, own = self.find(index)
        return fetched(self._data[name], name, own)

    def find(self, index: int) -> tuple[str, int]:
        """Return the source, and the index of the sample in it."""
        number = bisect_right(self._starts, index) - 1
        return list(self._data)[number], index - self._starts[number]


def fetched(data: Any, name: str, index: int) -> Any:
    """Fetch a sample of a source. Raises `DataFailed` with the source's name."""
    try:
        return data[index]
    except Exception as error:
        raise DataFailed(f"sample {index} of source {name!r}: {last_line(error)}") from error


@dataclass(frozen=True)
class _Stage:
    start: int
    stop: int
    shares: Shares


def _stages(
    weights: dict[str, float], changes: Sequence[tuple[int, Mapping[str, float]]]
) -> list[_Stage]:
    starts, shares = [0], [shares_of(weights, "")]
    ever = {name for name, weight in weights.items() if weight}
    for start, changed in changes:
        if type(start) is not int or start <= starts[-1]:
            raise DataError(
                f"a stage begins at sample {start!r}, after one at {starts[-1]}: stages are pairs "
                "(sample, {name: weight}) in ascending order"
            )
        for name in changed:
            if name not in weights:
                raise DataError(
                    f"the stage at sample {start} has a weight for {name!r}, which is no source: "
                    f"there are {', '.join(weights)}"
                )
        weights = {**weights, **changed}
        starts.append(start)
        shares.append(shares_of(weights, f" from sample {start} on"))
        ever |= {name for name, weight in weights.items() if weight}
    for name in weights:
        if name not in ever:
            raise DataError(
                f"the weight of source {name!r} is 0 from beginning to end: leave it out, or give "
                "it one in a stage"
            )
    spans = pairwise([*starts, LARGEST])
    return [_Stage(*span, each) for span, each in zip(spans, shares, strict=True)]


def _checked_length(name: str, data: Any) -> int | None:
    """Return the length of a source; None for a stream."""
    if isinstance(data, Batches | DataLoader | Mix):
        raise DataError(
            f"source {name!r} is a {type(data).__name__}, which makes batches or a mixture of its "
            "own: give its data set"
        )
    if is_indexed(data):
        try:
            size = length_of(data)
        except DataError as error:
            raise DataError(f"source {name!r}: {error}") from error
        if not size:
            raise DataError(f"source {name!r} ({type(data).__name__}) holds no samples")
        return size
    if not (hasattr(data, "__iter__") or callable(data)):
        raise DataError(
            f"source {name!r} ({type(data).__name__}) can be neither indexed (__len__ and "
            "__getitem__) nor iterated over, and is no function that makes an iterable"
        )
    return None


def draw_indices(size: int, seed: int, first: int, count: int) -> Tensor:
    """Return the indices in a source from its draw `first` on; each epoch has its own order."""
    parts = []
    while count:
        epoch, start = divmod(first, size)
        part = torch.as_tensor(shuffled(size, seed, epoch)[start : start + count])
        parts.append(part)
        first, count = first + len(part), count - len(part)
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

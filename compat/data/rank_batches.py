"""Shards an order of samples over the readers of a run, as accelerate does.

A *round* is one batch for each reader; with `split_batches`, one batch split into a part for each.
A reader takes its own batch of every round. The last round may be short: then it is dropped, left
ragged, or filled up with samples from the beginning of the epoch (`even_batches`).

Every reader iterates over the whole order and keeps its share: nothing is sent between ranks. So a
stream must give the same samples on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler

from ...data.reading import set_epoch
from ...data.stream import DIGESTED

__all__ = [
    "BatchSharder",
    "FixedShare",
    "IterableDatasetShard",
    "LaterBatches",
    "RankBatches",
    "RankStream",
    "SeededSampler",
    "Share",
    "chunks",
]

T = TypeVar("T")


class Share(Protocol):
    """The protocol for the reader of this process; `drivetrain.kernel.World` implements it."""

    @property
    def reader_index(self) -> int:
        """The index of this reader, from 0."""
        ...

    @property
    def num_readers(self) -> int:
        """The number of readers, at least 1."""
        ...


@dataclass(frozen=True)
class FixedShare:
    """A `Share` with given numbers; by default the only reader."""

    reader_index: int = 0
    num_readers: int = 1


class SeededSampler(RandomSampler):
    """torch's random sampler with an order that depends only on seed and epoch."""

    draws_by_epoch = True

    def __init__(self, like: RandomSampler, seed: int) -> None:
        super().__init__(
            like.data_source, like.replacement, like._num_samples, generator=torch.Generator()
        )
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iteration uses."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed + self.epoch)
        yield from super().__iter__()


class BatchSharder:
    """Selects one reader's batches out of the batches of all readers.

    `batch_size`: of one reader; None if batches have sizes of their own. `spread`: a short last
    round is shared evenly, as accelerate does if rank 0 reads for all; else each reader's part is
    filled up to a whole batch.
    """

    def __init__(
        self,
        share: Share,
        batch_size: int | None,
        *,
        split: bool = False,
        drop_last: bool = False,
        even: bool = True,
        spread: bool = False,
    ) -> None:
        self.index, self.size = share.reader_index, share.num_readers
        self.batch_size, self.split = batch_size, split
        self.drop_last, self.even, self.spread = drop_last, even, spread
        self.remainder = 0
        """Number of real samples in the last round; 0: all of them."""

    def own_batches(self, batches: Iterable[list[T]]) -> Iterator[list[T]]:
        """Yield this reader's batches, out of those of all readers."""
        self.remainder = 0
        first: list[list[T]] = []
        for turn in self._rounds(batches):
            first = first or turn
            if len(turn) == self.size and self.batch_size in (None, len(turn[-1])):
                yield turn[self.index]
            elif not self.drop_last:
                filled = turn
                if self.even:
                    self.remainder = sum(map(len, turn))
                    filled = self._filled(turn, first)
                if self.index < len(filled):
                    yield filled[self.index]

    def _rounds(self, batches: Iterable[list[T]]) -> Iterator[list[list[T]]]:
        batches = iter(batches)
        if self.split and self.batch_size is not None:
            yield from (list(chunks(batch, self.batch_size)) for batch in batches)
        else:
            yield from chunks(batches, self.size)

    def _filled(self, turn: list[list[T]], first: list[list[T]]) -> list[list[T]]:
        if self.batch_size is None:
            return list(islice(chain(turn, cycle(first)), self.size))
        real = sum(map(len, turn))
        part = math.ceil(real / self.size) if self.spread else self.batch_size
        samples = chain(*turn, cycle(list(chain(*first))))
        return [list(islice(samples, part)) for _ in range(self.size)]


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`; the last list may be shorter."""
    items = iter(items)
    while chunk := list(islice(items, size)):
        yield chunk


class RankBatches(Sampler[list[int]]):
    """A batch sampler: one reader's share of another batch sampler."""

    def __init__(self, batch_sampler: Any, sharder: BatchSharder) -> None:
        self.batch_sampler = batch_sampler
        self.sharder = sharder
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    def __iter__(self) -> Iterator[list[int]]:
        return self.sharder.own_batches(self.batch_sampler)

    def __len__(self) -> int:
        sharder = self.sharder
        if sharder.split:
            return len(self.batch_sampler)
        whole, rest = divmod(len(self.batch_sampler), sharder.size)
        if rest == 0 or sharder.drop_last:
            return whole
        return whole + (sharder.even or sharder.index < rest)


class RankStream(IterableDataset[Any]):
    """A stream: one reader's share of another stream.

    A stream that shuffles must shuffle equally on all ranks: by its own `set_epoch`, which is
    called, or by a `torch.Generator` named `generator`, which is seeded with `seed + epoch`.
    """

    def __init__(self, dataset: Any, sharder: BatchSharder, batch_size: int, seed: int = 0) -> None:
        self.dataset = dataset
        self.sharder = sharder
        self.global_batch = batch_size if sharder.split else batch_size * sharder.size
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0
        self.num_examples = 0
        """Number of samples of the current pass so far, for all readers."""
        self.first: list[Any] = []
        """The first of these samples, which must be equal on all readers."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, and pass it to the stream."""
        self.epoch = epoch
        set_epoch(self.dataset, epoch)

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.seed + self.epoch)
        self.num_examples, self.first = 0, []
        batches = chunks(self._counted(), self.batch_size)
        yield from chain.from_iterable(self.sharder.own_batches(batches))

    def _counted(self) -> Iterator[Any]:
        for sample in self.dataset:
            self.num_examples += 1
            if len(self.first) < min(self.global_batch, DIGESTED):
                self.first.append(sample)
            yield sample

    def __len__(self) -> int:
        """Return the number of samples of this reader. Raises TypeError if the stream has no
        length."""
        rounds = len(self.dataset) / self.global_batch
        own = self.global_batch // self.sharder.size
        return own * (math.floor(rounds) if self.sharder.drop_last else math.ceil(rounds))


class LaterBatches(Sampler[list[int]]):
    """A batch sampler without its first `num_skipped` batches, whose samples are not read."""

    def __init__(self, batch_sampler: Any, num_skipped: int) -> None:
        self.batch_sampler = batch_sampler
        self.num_skipped = num_skipped
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    def __iter__(self) -> Iterator[list[int]]:
        inner = self.batch_sampler
        if type(inner) is not BatchSampler:
            return islice(iter(inner), self.num_skipped, None)
        # skipping samples is faster than making batches of them
        samples = islice(iter(inner.sampler), self.num_skipped * inner.batch_size, None)
        batches = chunks(samples, inner.batch_size)
        return (each for each in batches if len(each) == inner.batch_size or not inner.drop_last)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.num_skipped)


class IterableDatasetShard(RankStream):
    """Shards a stream over ranks: of each `batch_size * num_processes` samples, it yields this
    rank's `batch_size`, so that all ranks yield the same number.

    An incomplete last group is dropped, or filled up from the first group.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        seed: int = 0,
    ) -> None:
        sharder = BatchSharder(
            FixedShare(process_index, num_processes), batch_size, drop_last=drop_last
        )
        super().__init__(dataset, sharder, batch_size, seed)
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index

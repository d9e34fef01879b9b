"""A DataLoader over one reader's share of a user's loader (see `rank_batches`)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch.autograd import profiler
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from ...data.own_generators import begun_as_before, end_workers
from ...data.private_names import private_name
from ...data.random_state import host_state
from ...data.reading import set_epoch
from ..common.placement import move
from .lengths import is_rebalancing
from .rank_batches import (
    BatchSharder,
    FixedShare,
    LaterBatches,
    RankBatches,
    RankStream,
    SeededSampler,
    Share,
)
from .worker_states import WorkerStates

__all__ = ["RankLoader", "batches_with_last", "num_real_samples", "shard", "skip_first_batches"]

T = TypeVar("T")


class RankLoader(DataLoader[Any]):
    """A DataLoader over one reader's share, which tracks its epoch and detects its last batch.

    Made by `shard`. It reads one batch ahead. Batches stay where the collate function put them,
    or are moved to `device`.
    """

    def __init__(
        self,
        like: DataLoader[Any],
        dataset: Any,
        batching: dict[str, Any],
        sharder: BatchSharder,
        *,
        active: list[RankLoader] | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(dataset, **batching, **_workers(like))
        self.sharder = sharder
        self.active: list[RankLoader] = [] if active is None else active
        """The loaders that are being iterated over, the innermost last; may be shared."""
        self.device = device
        self.epoch = 0
        self.end_of_dataloader = False
        """True if the current batch is the last one."""
        self.skipped_stream_batches = 0
        self.plain = False
        """Behave like a plain DataLoader: set no epoch, and read ahead only in streams. Elsewhere
        `end_of_dataloader` is then unknown.
        """
        self.notes_state = False
        """True to fill `state_ahead`: for the training loader, whose position is saved in
        checkpoints."""
        self.state_ahead: tuple[Any, ...] | None = None
        """The state of the host's generators before the batch after the current one was read."""
        self.workers: WorkerStates | None = None
        """Records the random state of data workers: for the training loader."""
        self.first_batch = 0
        """Number of the first batch of a pass, counted in its epoch."""
        self.batches_again = 0
        """Number of batches of the next pass to read but not yield: they were trained on
        already."""
        self.around_first: AbstractContextManager[None] | None = None
        """A context manager entered once, around reading the first batch of the next pass."""

    @property
    def remainder(self) -> int:
        """The number of real samples in the last global batch, in the order in which ranks' batches
        are gathered; 0: all of them; -1: unknown, since workers partition the stream.
        """
        if isinstance(self.dataset, RankStream) and self.num_workers > 0:
            return -1
        return self.sharder.remainder

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a batch over all readers; None where batches have sizes of their own."""
        size = self.sharder.batch_size
        return None if size is None else size * self.sharder.size

    @property
    def total_dataset_length(self) -> int:
        """Number of samples that all readers share."""
        data: Any = self.dataset
        return len(data.dataset if isinstance(data, RankStream) else data)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, for the samplers and the data set, too.
        Idempotent.
        """
        self.epoch = epoch
        if self.plain:
            return
        sampler: Any = self.sampler if self.batch_sampler is None else self.batch_sampler
        while sampler is not None:
            set_epoch(sampler, epoch)
            inner = getattr(sampler, "batch_sampler", None)
            sampler = inner if inner is not None else getattr(sampler, "sampler", None)
        set_epoch(self.dataset, epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own class
        self.set_epoch(self.epoch)
        self.end_of_dataloader = False
        self.active.append(self)
        try:
            batches: Any = self._opened()
            if self.workers is not None:
                batches = self.workers.received(batches)
            is_stream = isinstance(self.dataset, IterableDataset)
            again, self.batches_again = self.batches_again, 0
            if is_stream:  # which counts its batches by itself
                batches = islice(batches, self.skipped_stream_batches, None)
            elif again:
                batches = islice(batches, again, None)
            else:
                batches = _quick(batches)
            device = self.device
            if device is not None and device.type == "cpu":
                device = None  # the device of collated batches
            if self.notes_state and self.num_workers == 0:
                batches = self._noting_states(batches)
            batches = self._first_apart(batches)
            ahead = not self.plain or is_stream  # detecting the end may draw, too
            for batch, is_last in with_last(batches) if ahead else ((b, False) for b in batches):
                if is_last:  # a DataLoader checks each attribute that is set
                    self.end_of_dataloader = True
                yield batch if device is None else move(batch, device)
            self.epoch += 1
        finally:
            self.active.remove(self)

    def _opened(self) -> Any:
        """Open the iterator of this epoch. Persistent workers are started again for a data set with
        `set_epoch`, since each worker has its own copy."""
        restarts_workers = callable(getattr(self.dataset, "set_epoch", None)) and not self.plain
        if restarts_workers:
            end_workers(self)
        begin, workers = super().__iter__, self.workers
        with begun_as_before(self, self.epoch):
            if workers is None:
                batches: Any = begin()
            else:
                first = 0 if isinstance(self.dataset, IterableDataset) else self.first_batch
                stay = self.persistent_workers and not restarts_workers
                batches = workers.open(self, self.epoch, first, stay, begin)
        if self.around_first is not None and hasattr(batches, "_sampler_iter"):
            # draw the order now, before the generators for the first batch are restored
            order = batches._sampler_iter
            batches._sampler_iter = chain(list(islice(order, 1)), order)
        return batches

    def _noting_states(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            self.state_ahead = host_state()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def _first_apart(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self.around_first is not None:
            around, self.around_first = self.around_first, None
            with around:
                first = list(islice(batches, 1))
            yield from first
        yield from batches


def num_real_samples(loader: Any, is_last: bool) -> tuple[int, int] | None:
    """Return the number of real samples in this reader's last batch, and of all; None if no reader
    has both real samples and fillers, or it is unknown. Either all readers get None, or none does.
    """
    if not is_last or not isinstance(loader, RankLoader):
        return None
    sharder, remainder = loader.sharder, loader.remainder
    size = sharder.batch_size
    if size is None or remainder <= 0 or not sharder.even:
        return None
    if sharder.spread:
        size = math.ceil(remainder / sharder.size)
    real = min(max(remainder - sharder.index * size, 0), size)
    return (real, size) if remainder % size else None


def shard(
    loader: DataLoader[Any],
    share: Share,
    *,
    seed: int | None = None,
    split_batches: bool = False,
    even_batches: bool = True,
    dispatch_batches: bool | None = None,
    active: list[RankLoader] | None = None,
    device: torch.device | None = None,
) -> RankLoader:
    """Return a loader over this reader's share of the batches of `loader`.

    `seed`: random samplers shuffle by `seed + epoch`, equally on every rank; None leaves samplers
    unchanged. `split_batches`: the loader's batch size counts all readers together. `even_batches`:
    a short last round is filled up with samples from the beginning. `dispatch_batches`: if False, a
    stream of `datasets` gives each rank its own shards, and the last round of other streams is
    filled up; if unset, the last round of a stream is shared as if rank 0 had read it for all. A
    batch sampler with a true attribute `rank_aware`, transformers' length-balancing sampler, and a
    loader that was sharded before are left unchanged. So is a stream with such an attribute, or one
    that `split_dataset_by_node` has split for as many readers: each rank reads its own stream
    completely.

    Raises ValueError for a loader that cannot be sharded: a batch size that `split_batches` cannot
    divide, `dispatch_batches=True` on several ranks, unseeded random samplers on several ranks.
    """
    if isinstance(loader, RankLoader):
        return loader
    if share.num_readers > 1 and dispatch_batches:
        raise ValueError(
            "dispatch_batches=True asks rank 0 to read for all ranks. Here each rank reads the data"
            " set itself and keeps its share, which sends nothing. Leave dispatch_batches unset,"
            " and make sure that the data set is readable, and the same, on every rank."
        )
    shared: dict[str, Any] = {"active": active, "device": device}
    if isinstance(loader.dataset, IterableDataset):
        spread = dispatch_batches is None
        return _shard_stream(loader, share, split_batches, spread, shared)
    sampler = loader.batch_sampler
    name = "batch_sampler"
    if sampler is None:  # the sampler yields batches, or the data set holds batches
        sampler, name = loader.sampler, "sampler"
    sampler = _seeded(sampler, seed, share)
    sharder = _sharder(sampler, share, split_batches, even_batches)
    knows_rank = getattr(sampler, "rank_aware", False) or is_rebalancing(sampler)
    if share.num_readers > 1 and not knows_rank:
        if name == "sampler" and not isinstance(sampler, BatchSampler):
            raise ValueError(
                "a DataLoader with batch_size=None gives samples one by one, which cannot be "
                "sharded over several ranks; give it a batch size, or a BatchSampler as its sampler"
            )
        sampler = RankBatches(sampler, sharder)
    batching = {name: sampler} if name == "batch_sampler" else {name: sampler, "batch_size": None}
    return RankLoader(loader, loader.dataset, batching, sharder, **shared)


def skip_first_batches(loader: DataLoader[Any], num_batches: int) -> RankLoader:
    """Return the same loader, at the same epoch, without its first `num_batches` batches in every
    pass.

    Their samples are not read, except from a stream.
    """
    loader = shard(loader, FixedShare())
    batching: dict[str, Any]
    skipped = 0
    if isinstance(loader.dataset, IterableDataset):
        batching = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        skipped = num_batches
    elif loader.batch_sampler is None:
        batching = {"sampler": LaterBatches(loader.sampler, num_batches), "batch_size": None}
    else:
        batching = {"batch_sampler": LaterBatches(loader.batch_sampler, num_batches)}
    later = RankLoader(
        loader, loader.dataset, batching, loader.sharder, active=loader.active, device=loader.device
    )
    later.epoch = loader.epoch
    later.skipped_stream_batches = skipped
    return later


def _shard_stream(
    loader: DataLoader[Any], share: Share, split: bool, spread: bool, shared: dict[str, Any]
) -> RankLoader:
    stream, size = loader.dataset, loader.batch_size
    own = _own_size(size, share, split)
    sharder = BatchSharder(share, own, split=split, drop_last=loader.drop_last, spread=spread)
    batching = {"batch_size": own, "drop_last": loader.drop_last}
    if share.num_readers > 1 and not _is_split(stream, share):
        if not (spread or split) and _has_shards(stream, share.num_readers):
            shards, index = share.num_readers, share.reader_index
            stream = stream.shard(num_shards=shards, index=index)  # type: ignore[attr-defined]
        elif size is None:
            raise ValueError(
                "a stream with batch_size=None cannot be sharded over several ranks; give the "
                "DataLoader a batch size, or let the data set itself give each rank its share"
            )
        else:
            stream = RankStream(stream, sharder, size)
    return RankLoader(loader, stream, batching, sharder, **shared)


def _is_split(stream: Any, share: Share) -> bool:
    """True if the stream gives each rank its own samples already: it has a true `rank_aware`, or
    `datasets.distributed.split_dataset_by_node` has split it for as many readers."""
    split = getattr(stream, "_distributed", None)
    as_many = getattr(split, "world_size", None) == share.num_readers
    mine = getattr(split, "rank", None) == share.reader_index
    return bool(getattr(stream, "rank_aware", False)) or (as_many and mine)


def _has_shards(stream: Any, size: int) -> bool:
    """True for a stream of `datasets` with at least one shard per reader."""
    return hasattr(stream, "shard") and getattr(stream, "n_shards", 0) >= size


def _sharder(sampler: Any, share: Share, split: bool, even: bool) -> BatchSharder:
    own = _own_size(getattr(sampler, "batch_size", None), share, split)
    drop_last = getattr(sampler, "drop_last", False)
    return BatchSharder(share, own, split=split, drop_last=drop_last, even=even)


def _own_size(batch_size: int | None, share: Share, split: bool) -> int | None:
    if not split or share.num_readers == 1:
        return batch_size
    if batch_size is None or batch_size % share.num_readers:
        raise ValueError(
            f"split_batches splits each batch into {share.num_readers} equal parts, one a rank, but"
            f" the batch size is {batch_size}; make it a multiple of {share.num_readers}"
        )
    return batch_size // share.num_readers


def _seeded(sampler: Any, seed: int | None, share: Share) -> Any:
    """Return the sampler, or a copy of it with a seeded random sampler."""
    random = getattr(sampler, "sampler", sampler)
    if not isinstance(random, RandomSampler) or isinstance(random, SeededSampler):
        return sampler
    if seed is None:
        if share.num_readers > 1:
            raise ValueError(
                "an unseeded random sampler would give each rank another order; leave"
                " use_seedable_sampler=True, or give the loader a sampler of your own"
            )
        return sampler
    seeded = SeededSampler(random, seed)
    if random is sampler:
        return seeded
    sampler = copy.copy(sampler)
    sampler.sampler = seeded
    return sampler


def _workers(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the workers and the collator of a loader as keywords for another loader."""
    names = (
        "collate_fn generator in_order multiprocessing_context num_workers persistent_workers"
        " pin_memory pin_memory_device prefetch_factor timeout worker_init_fn"
    )
    return {name: getattr(loader, name) for name in names.split()}


_FETCHES_ITSELF = private_name("torch.utils.data.dataloader", "_SingleProcessDataLoaderIter", ())
"""Class of the iterator of a DataLoader without workers."""


def _quick(batches: Any) -> Iterator[Any]:
    """Yield the batches of a DataLoader's iterator. If it fetches in this process and no profiler
    runs, skip the profiler range that it would open around each batch."""
    if not isinstance(batches, _FETCHES_ITSELF):
        yield from batches
        return
    fetch: Callable[[], Any] = batches._next_data
    while True:
        try:
            profiled = getattr(profiler, "_is_profiler_enabled", True)  # unless torch says no
            batch = next(batches) if profiled else fetch()
        except StopIteration:
            return
        yield batch


def batches_with_last(dataloader: Any) -> Iterator[tuple[Any, bool]]:
    """Yield each batch, and whether it is the last. Loaders of this package know it without reading
    ahead."""
    if not isinstance(dataloader, RankLoader):
        return with_last(dataloader)
    return ((batch, dataloader.end_of_dataloader) for batch in dataloader)


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield each item, and whether it is the last; reads one item ahead."""
    items = iter(items)
    for held in items:
        for following in items:
            yield held, False
            held = following
        yield held, True

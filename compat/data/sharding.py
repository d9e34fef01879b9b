"""A DataLoader over one reader's share of what a user's loader gives (see `rank_batches`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.autograd import profiler
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from ...data.reading import set_epoch
from ..trainer.placement import move
from .lengths import is_rebalancing
from .rank_batches import (
    BatchSharder,
    LaterBatches,
    OneOf,
    RankBatches,
    RankStream,
    SeededSampler,
    Share,
)

__all__ = ["RankLoader", "shard", "skip_first_batches", "with_last"]

T = TypeVar("T")


class RankLoader(DataLoader[Any]):
    """A DataLoader over one reader's share, that knows its epoch and when it is at its end.

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
        """The loaders that are being walked through, the innermost last; may be shared."""
        self.device = device
        self.epoch = 0
        self.end_of_dataloader = False
        """True if the batch in hand is the last one."""
        self.skipped_stream_batches = 0

    @property
    def remainder(self) -> int:
        """The number of real samples in the last global batch, in the order in which ranks'
        batches are gathered; 0: all of them. -1: not known, since workers cut the stream.
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
        """Samples that all readers share."""
        data: Any = self.dataset
        return len(data.dataset if isinstance(data, RankStream) else data)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch comes next, told to the samplers and the data set. Idempotent."""
        self.epoch = epoch
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
            batches: Iterator[Any] = super().__iter__()
            if isinstance(self.dataset, IterableDataset):  # of which it counts what it was asked
                batches = islice(batches, self.skipped_stream_batches, None)
            else:
                batches = _quick(batches)
            device = self.device
            if device is not None and device.type == "cpu":
                device = None  # where collated batches are
            for batch, is_last in with_last(batches):
                if is_last:  # a DataLoader looks at each attribute that is set
                    self.end_of_dataloader = True
                yield batch if device is None else move(batch, device)
            self.epoch += 1
        finally:
            self.active.remove(self)


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
    """A loader over this reader's share of the batches of `loader`.

    `seed`: random samplers shuffle by `seed + epoch`, the same on every rank; None leaves them as
    they are. `split_batches`: the loader's batch size is the whole of all readers, not of one.
    `even_batches`: a short last round is filled up with samples from the beginning.
    `dispatch_batches`: False lets a stream of `datasets` give each rank shards of its own, and
    fills the last round of other streams up; unset, the last round of a stream is shared out as
    if rank 0 had read it for all. A batch sampler with a true attribute `rank_aware`, or of
    transformers' that balances lengths, is left as it is, and so is a loader that was sharded
    before.

    Raises ValueError for what cannot be dealt: a batch size that `split_batches` cannot divide,
    `dispatch_batches=True` on several ranks, unseeded random samplers on several ranks.
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
    if sampler is None:  # batches are what the sampler gives, or what the data set holds
        sampler, name = loader.sampler, "sampler"
    sampler = _seeded(sampler, seed, share)
    sharder = _sharder(sampler, share, split_batches, even_batches)
    knows_rank = getattr(sampler, "rank_aware", False) or is_rebalancing(sampler)
    if share.num_readers > 1 and not knows_rank:
        if name == "sampler" and not isinstance(sampler, BatchSampler):
            raise ValueError(
                "a DataLoader with batch_size=None gives samples one by one, which cannot be dealt"
                " to several ranks; give it a batch size, or a BatchSampler as its sampler"
            )
        sampler = RankBatches(sampler, sharder)
    batching = {name: sampler} if name == "batch_sampler" else {name: sampler, "batch_size": None}
    return RankLoader(loader, loader.dataset, batching, sharder, **shared)


def skip_first_batches(loader: DataLoader[Any], num_batches: int) -> RankLoader:
    """The same loader, at the same epoch, without its first `num_batches` batches, in every pass.

    No sample of theirs is read, but of a stream, which is drawn to its place.
    """
    loader = shard(loader, OneOf())
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
    if share.num_readers > 1:
        if not (spread or split) and _has_shards(stream, share.num_readers):
            shards, index = share.num_readers, share.reader_index
            stream = stream.shard(num_shards=shards, index=index)  # type: ignore[attr-defined]
        elif size is None:
            raise ValueError(
                "a stream with batch_size=None cannot be dealt to several ranks; give the"
                " DataLoader a batch size, or let the data set itself give each rank its share"
            )
        else:
            stream = RankStream(stream, sharder, size)
    return RankLoader(loader, stream, batching, sharder, **shared)


def _has_shards(stream: Any, size: int) -> bool:
    """True if it is a stream of `datasets` with at least one shard a reader."""
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
            f"split_batches cuts each batch into {share.num_readers} equal parts, one a rank, but"
            f" the batch size is {batch_size}; make it a multiple of {share.num_readers}"
        )
    return batch_size // share.num_readers


def _seeded(sampler: Any, seed: int | None, share: Share) -> Any:
    """The sampler, or a copy of it in which the random sampler is a seeded one."""
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
    """The workers and collator of a loader, as keywords for another one."""
    names = (
        "collate_fn generator in_order multiprocessing_context num_workers persistent_workers"
        " pin_memory pin_memory_device prefetch_factor timeout worker_init_fn"
    )
    return {name: getattr(loader, name) for name in names.split()}


def _quick(batches: Any) -> Iterator[Any]:
    """The same batches of a DataLoader's iterator. Where it fetches them itself, it is asked behind
    the range that it opens around each for a profiler, while there is none."""
    if not isinstance(batches, _SingleProcessDataLoaderIter):
        yield from batches
        return
    fetch: Callable[[], Any] = batches._next_data
    while True:
        try:
            batch = next(batches) if profiler._is_profiler_enabled else fetch()
        except StopIteration:
            return
        yield batch


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last; reads one ahead."""
    items = iter(items)
    for held in items:
        for following in items:
            yield held, False
            held = following
        yield held, True

"""Ranks receive their batches in accelerate's order: both libraries are asked, and compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, prepare_data_loader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from drivetrain.compat.data.rank_batches import BatchSharder, FixedShare, RankStream
from drivetrain.compat.data.sharding import RankLoader, shard, skip_first_batches
from drivetrain.compat.trainer.epochs import Epochs
from drivetrain.data.sample_digest import digest_of
from drivetrain.kernel.errors import DataError


@dataclass(frozen=True)
class Rank:
    """A reader among several, simulated in one process."""

    reader_index: int = 0
    num_readers: int = 1


ALONE = Rank()
PAIR = (Rank(0, 2), Rank(1, 2))


class Numbers(IterableDataset[int]):
    """The numbers from 0 on, and the epochs that were set."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def batches(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.row("D26")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [False, True])
def test_indices_are_sharded_as_by_accelerate(
    ranks: int, split: bool, drop_last: bool, even: bool
) -> None:
    batch_size = 6 if split else 2
    for count in range(1, 30):
        sampler = BatchSampler(SequentialSampler(range(count)), batch_size, drop_last)
        loader = DataLoader(range(count), batch_sampler=sampler)
        for index in range(ranks):
            options: dict[str, bool] = {"split_batches": split, "even_batches": even}
            theirs = BatchSamplerShard(sampler, ranks, index, **options)
            ours = shard(loader, Rank(index, ranks), seed=0, **options)
            assert batches(ours) == list(theirs), (count, index)
            if not (split and not even):  # there, accelerate's length is one too many
                assert len(ours) == len(theirs), (count, index)


@pytest.mark.row("D26")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_streams_are_sharded_as_by_accelerate(ranks: int, split: bool, drop_last: bool) -> None:
    batch_size = 6 if split else 2
    for count in range(30):
        stream = Numbers(count)
        loader = DataLoader(stream, batch_size=batch_size, drop_last=drop_last)
        for index in range(ranks):
            theirs = IterableDatasetShard(stream, batch_size, drop_last, ranks, index, split)
            ours = shard(loader, Rank(index, ranks), split_batches=split, dispatch_batches=False)
            assert sum(batches(ours), []) == list(theirs)


@pytest.mark.row("D4", "D5")
@pytest.mark.parametrize("ranks", [1, 2])
def test_shuffling_is_accelerates(ranks: int) -> None:
    accelerate.PartialState(cpu=True)
    for index in range(ranks):
        theirs = prepare_data_loader(
            DataLoader(range(11), batch_size=2, shuffle=True),
            num_processes=ranks,
            process_index=index,
            use_seedable_sampler=True,
            data_seed=7,
        )
        ours = shard(DataLoader(range(11), batch_size=2, shuffle=True), Rank(index, ranks), seed=7)
        seen = []
        for epoch in (0, 1, 2, 0):
            theirs.set_epoch(epoch)
            ours.set_epoch(epoch)
            torch.rand(epoch + 1)  # what else is drawn does not matter
            seen.append(batches(ours))
            assert seen[-1] == [batch.tolist() for batch in theirs]
        assert seen[0] != seen[1] and seen[0] == seen[3]


def test_without_set_epoch_epochs_follow_each_other() -> None:
    first = shard(DataLoader(range(9), shuffle=True), ALONE, seed=3)
    second = shard(DataLoader(range(9), shuffle=True), ALONE, seed=3)
    for epoch in range(3):
        second.set_epoch(epoch)
        assert batches(first) == batches(second)


@pytest.mark.row("D8", "D9")
def test_a_short_last_round_of_a_stream_is_shared_out() -> None:
    def sharded(count: int) -> list[list[list[int]]]:
        return [batches(shard(DataLoader(Numbers(count), batch_size=4), rank)) for rank in PAIR]

    assert sharded(8) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert sharded(11) == [[[0, 1, 2, 3], [8, 9]], [[4, 5, 6, 7], [10, 0]]]
    assert sharded(0) == [[], []]


@pytest.mark.row("D26")
@pytest.mark.parametrize("count", [5, 7, 8, 9, 3, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_the_repeats_of_the_last_round_can_be_trimmed(count: int, stream: bool) -> None:
    data = Numbers(count) if stream else range(count)
    loaders = [shard(DataLoader(data, batch_size=2), rank, seed=0) for rank in PAIR]
    kept: list[int] = []
    for parts in zip(*loaders, strict=True):
        gathered = torch.cat(parts).tolist()
        ends = {loader.end_of_dataloader for loader in loaders}
        assert len(ends) == 1
        remainder = loaders[0].remainder if ends == {True} else 0
        kept += gathered[:remainder] if remainder else gathered
    assert kept == list(range(count))


@pytest.mark.row("D10")
def test_the_epoch_reaches_samplers_and_data() -> None:
    stream = Numbers(4)
    loader = shard(DataLoader(stream, batch_size=2), PAIR[0])
    loader.set_epoch(3)
    assert batches(loader) == [[0, 1]]
    assert set(stream.epochs) == {3}

    shuffled = shard(DataLoader(range(8), shuffle=True), PAIR[1], seed=1)
    skip_first_batches(shuffled, 1).set_epoch(5)
    assert shuffled.batch_sampler.batch_sampler.sampler.epoch == 5  # type: ignore[union-attr]


@pytest.mark.row("D10")
def test_a_stream_with_a_generator_is_in_step_on_all_ranks() -> None:
    class Shuffled(IterableDataset[int]):
        def __init__(self) -> None:
            self.generator = torch.Generator()

        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(8, generator=self.generator).tolist())

    loaders = [shard(DataLoader(Shuffled(), batch_size=2), rank) for rank in PAIR]
    orders = []
    for _ in range(2):
        parts = [sum(batches(loader), []) for loader in loaders]
        orders.append(parts)
        assert sorted(sum(parts, [])) == list(range(8))
    assert orders[0] != orders[1]


class Watched:
    """A data set that records which samples were read."""

    def __init__(self, count: int) -> None:
        self.read: list[int] = []
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


@pytest.mark.parametrize("rank", [ALONE, *PAIR])
def test_skipped_batches_are_not_read(rank: Rank) -> None:
    data = Watched(20)
    loader = shard(DataLoader(data, batch_size=2, shuffle=True), rank, seed=0)  # type: ignore[arg-type]
    loader.set_epoch(2)
    whole = batches(loader)
    loader.set_epoch(2)
    data.read.clear()
    later = skip_first_batches(loader, 3)
    assert len(later) == len(whole) - 3
    assert batches(later) == whole[3:]
    assert data.read == sum(whole[3:], [])


def test_skipping_in_a_stream_draws_to_the_place() -> None:
    loader = shard(DataLoader(Numbers(10), batch_size=2), ALONE)
    assert batches(skip_first_batches(loader, 2)) == [[4, 5], [6, 7], [8, 9]]
    assert batches(skip_first_batches(DataLoader(range(6), batch_size=2), 2)) == [[4, 5]]


def test_a_loader_knows_whether_it_is_walked_through() -> None:
    active: list[RankLoader] = []
    outer = shard(DataLoader(range(4)), ALONE, active=active)
    inner = shard(DataLoader(range(2)), ALONE, active=active)
    for _ in outer:
        for _ in inner:
            assert active == [outer, inner]
        assert active == [outer]
    assert active == []
    assert outer.total_batch_size == 1 and outer.total_dataset_length == 4


def test_sharding_twice_changes_nothing() -> None:
    loader = shard(DataLoader(range(8)), PAIR[0])
    assert shard(loader, PAIR[0]) is loader


def test_a_batch_sampler_as_sampler_is_sharded_too() -> None:
    sampler = BatchSampler(SequentialSampler(range(8)), 2, False)
    loader = DataLoader(torch.arange(8), sampler=sampler, batch_size=None)  # type: ignore[arg-type]
    assert [batches(shard(loader, rank)) for rank in PAIR] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_batches_of_sizes_of_their_own_are_assigned_whole() -> None:
    loader = DataLoader(range(6), batch_sampler=[[0], [1, 2], [3, 4, 5]])
    assert [batches(shard(loader, rank)) for rank in PAIR] == [[[0], [3, 4, 5]], [[1, 2], [0]]]


@pytest.mark.parametrize(
    ("loader", "options", "words"),
    [
        (DataLoader(range(4), batch_size=3), {"split_batches": True}, "multiple of 2"),
        (DataLoader(range(4)), {"dispatch_batches": True}, "each rank reads"),
        (DataLoader(range(4), shuffle=True), {"seed": None}, "use_seedable_sampler"),
        (DataLoader(range(4), batch_size=None), {}, "BatchSampler"),
        (DataLoader(Numbers(4), batch_size=None), {}, "batch size"),
    ],
)
@pytest.mark.row(
    "D21",
    status="refused",
    note="on several ranks: dispatch_batches=True for data of known length, which each rank reads "
    "for itself, an order without a seed, and a loader without a batch size",
)
def test_what_cannot_be_partitioned_is_refused(
    loader: DataLoader[int], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        shard(loader, PAIR[0], **options)


def test_a_profiler_sees_the_loader_from_when_it_is_there() -> None:
    loader = iter(shard(DataLoader(range(8), batch_size=2), ALONE))
    assert next(loader).tolist() == [0, 1]
    with torch.profiler.profile() as profile:
        assert next(loader).tolist() == [2, 3]
    assert any("DataLoader" in event.name for event in profile.events())
    assert [batch.tolist() for batch in loader] == [[4, 5], [6, 7]]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [1, 6, 7, 20])
def test_what_is_skipped_is_skipped_by_samples_as_by_batches(count: int, drop_last: bool) -> None:
    loader = DataLoader(range(count), batch_size=3, drop_last=drop_last)
    everything = batches(loader)
    for skipped in range(len(everything) + 2):
        assert batches(skip_first_batches(loader, skipped)) == everything[skipped:]


def test_a_stream_that_is_split_by_rank_stays_as_it_is() -> None:
    """Require that a stream split by `datasets`, or one that says so itself, stays as it is. Other
    streams are divided among ranks.
    """
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"n": list(range(8))}).to_iterable_dataset(num_shards=2)
    split = pytest.importorskip("datasets.distributed").split_dataset_by_node
    parts = [split(whole, rank, 2) for rank in range(2)]
    loaders = [
        shard(DataLoader(part, batch_size=2), FixedShare(rank, 2))
        for rank, part in enumerate(parts)
    ]
    read = [[n for batch in loader for n in batch["n"].tolist()] for loader in loaders]
    assert sorted(read[0] + read[1]) == list(range(8))

    class Own(IterableDataset[int]):
        rank_aware = True

        def __iter__(self) -> Any:
            return iter(range(6))

    for aware, expected in ((True, [0, 1, 2, 3, 4, 5]), (False, [2, 3, 5])):
        stream = Own()
        stream.rank_aware = aware
        sharded = shard(DataLoader(stream, batch_size=2), FixedShare(1, 2))
        assert [n for batch in sharded for n in batch.tolist()] == expected


def test_a_stream_that_ranks_have_split_themselves_is_refused() -> None:
    def reported(rank: int) -> str:
        stream = RankStream(range(rank, 40, 2), BatchSharder(FixedShare(rank, 2), 2), 2)
        loader: Any = DataLoader(stream, batch_size=2)
        others = digest_of(list(range(1 - rank, 40, 2))[:4])
        session: Any = SimpleNamespace(
            exchange=lambda own: [own, others] if not rank else [others, own]
        )
        trainer: Any = SimpleNamespace(driver_session=SimpleNamespace(session=session))
        epochs = Epochs(trainer, loader, 1, 5, 5, 1, 4)
        next(epochs._batches(0, 0))
        with pytest.raises(DataError) as refused:
            epochs._refuse_split_stream()
        return str(refused.value)

    assert reported(0) == reported(1)
    assert "range; digests of the first ones: rank 0" in reported(0)
    assert "set rank_aware=True on it" in reported(0)

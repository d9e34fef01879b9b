"""Ready batches: taken as they come, from a separate loader for each reader."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from drivetrain.data.open_dataset import open_dataset
from drivetrain.data.prebatched import Batches, PrebatchedLoader, count_rows
from drivetrain.kernel.batches import ENDLESS, Position
from drivetrain.kernel.errors import DataError, DataFailed, SettingError

from . import thread_world
from .thread_world import ThreadSession, on_ranks

quickly = settings(deadline=None, max_examples=40)
START = Position()


def read(
    batches: Batches,
    start: Position = START,
    num_steps: int = ENDLESS,
    session: Any = None,
    **options: Any,
) -> list[Any]:
    """Return each group with its microbatches."""
    source = PrebatchedLoader(batches, session or ThreadSession(), **options)
    return [(group, list(group.microbatches)) for group in source.groups(start, num_steps)]


def values(steps: list[Any]) -> list[list[list[int]]]:
    """Return, for each step, the samples of each microbatch that counts."""
    return [[each.batch.tolist() for each in parts if each.num_samples] for _, parts in steps]


@quickly
@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=7), min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_readers_stay_in_step_whatever_they_have(sizes: list[list[int]], accumulation: int) -> None:
    """Read batches of these `sizes`, given for each reader."""

    def job(session: Any) -> Any:
        reader = session.world.reader_index
        own = [torch.full((size,), reader) for size in sizes[reader]]
        return read(Batches(own, accumulation), session=session, num_epochs=2)

    readers = on_ranks(job, len(sizes))
    numbers: list[int] = []
    for steps in zip(*readers, strict=True):
        groups = [group for group, _ in steps]
        assert len({(g.num_samples, g.num_microbatches, g.next.samples) for g in groups}) == 1
        counted = [sum(each.num_samples for each in parts) for _, parts in steps]
        assert sum(counted) == groups[0].num_samples
        assert [group.num_items for group in groups] == counted
        assert all(len(parts) == groups[0].num_microbatches for _, parts in steps)
        if groups[0].position.epoch == 0:
            numbers += [
                number
                for _, parts in steps
                for each in parts
                for number in range(each.offset, each.offset + each.num_samples)
            ]
    for reader, steps in enumerate(readers):
        taken = [batch for step in values(steps) for batch in step]
        assert taken == [[reader] * size for size in sizes[reader]] * 2
    assert sorted(numbers) == list(range(sum(map(sum, sizes))))


class Noise:
    """A data set that draws random numbers."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random(), float(torch.rand(()))])


@pytest.mark.parametrize("stops", [[2], [1, 3], [1, 1, 1, 1, 1]])
def test_a_resumed_loader_goes_on_where_it_was(stops: list[int]) -> None:
    def batches() -> Batches:
        return Batches(DataLoader(Noise(), batch_size=3, shuffle=True), 2)

    whole = values(read(batches(), num_epochs=2, seed=5))
    assert sorted(int(row[0]) for step in whole[:4] for batch in step for row in batch) == [
        *range(20)
    ]
    found, position = [], Position()
    for stop in [*stops, ENDLESS]:
        torch.manual_seed(stop), random.seed(stop)
        steps = read(batches(), position, stop, num_epochs=2, seed=5)
        found += values(steps)
        position = steps[-1][0].next
    assert found == whole


def test_the_process_s_random_numbers_may_be_used() -> None:
    def draw() -> list[Any]:
        torch.manual_seed(8), random.seed(8)
        loader = DataLoader(Noise(), batch_size=20, shuffle=True)
        return values(read(Batches(loader, isolate_random=False), num_epochs=1))

    torch.manual_seed(8), random.seed(8)
    (expected,) = DataLoader(Noise(), batch_size=20, shuffle=True)
    assert draw() == [[expected.tolist()]]


def test_the_epoch_is_passed_to_the_sampler() -> None:
    sampler: Any = DistributedSampler(Noise(), num_replicas=2, rank=1, shuffle=True, seed=4)
    loader = DataLoader(Noise(), batch_size=10, sampler=sampler)
    found = values(read(Batches(loader), num_epochs=2))
    for epoch, ((batch,),) in enumerate(zip(found, strict=True)):
        sampler.set_epoch(epoch)
        assert [int(row[0]) for row in batch] == list(sampler)


def test_lengths_are_known_where_loaders_have_them() -> None:
    def job(session: Any) -> Any:
        own = [torch.zeros(1)] * (5 if session.world.rank else 4)
        known = PrebatchedLoader(Batches(own, 2), session)
        unknown = PrebatchedLoader(Batches(iter(own) if session.world.rank else own, 2), session)
        return [
            (each.steps_per_epoch, each.epoch_length, each.num_samples) for each in (known, unknown)
        ]

    assert on_ranks(job, 2) == [[(3, 10, None), (None, None, None)]] * 2


def test_dropping_the_last() -> None:
    own = [torch.zeros(1)] * 5
    assert len(read(Batches(own, 2), num_epochs=1, drop_last=True)) == 2
    assert PrebatchedLoader(Batches(own, 2), ThreadSession(), drop_last=True).steps_per_epoch == 2


def test_items_are_counted_by_the_recipe() -> None:
    own = [torch.tensor([1, 2]), torch.tensor([5])]
    ((group, _),) = read(Batches(own, 2), num_epochs=1, count_items=lambda batch: int(batch.sum()))
    assert (group.num_items, group.num_samples) == (8, 3)


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (torch.zeros(3, 2), 3),
        ({"mask": None, "x": [torch.tensor(1), torch.zeros(2, 5)]}, 2),
        ((torch.zeros(4), torch.zeros(9)), 4),
    ],
)
def test_rows_of_a_batch(batch: Any, rows: int) -> None:
    assert count_rows(batch) == rows


def broken() -> Iterator[Tensor]:
    yield torch.zeros(1)
    raise KeyError("no such file")


@pytest.mark.parametrize(
    ("loader", "start", "message"),
    [
        ([["a", "b"]], Position(), "list holds no tensor"),
        ([torch.zeros(0)], Position(), "holds no samples"),
        ([], Position(), "holds no samples"),
        ([torch.zeros(1)], Position(0, 3), "3 batches.*ends after 1"),
    ],
)
def test_what_cannot_be_read_is_named(loader: Any, start: Position, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(Batches(loader), start)


def test_a_loader_that_raises_is_the_cause() -> None:
    with pytest.raises(DataFailed, match=r"batch 1 of epoch 0.*no such file") as caught:
        read(Batches(broken()), Position())
    assert isinstance(caught.value.__cause__, KeyError)


def test_who_never_had_a_batch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_world, "LONGEST_WAIT_SECONDS", 2.0)  # by the other rank

    def job(session: Any) -> Any:
        return read(Batches([torch.zeros(1)] * session.world.rank), session=session)

    assert "reader 0 was given no batch" in str(on_ranks(job, 2)[0])


def test_a_position_of_another_world_is_refused_unless_it_fits() -> None:
    def job(session: Any) -> Any:
        own = [torch.tensor([session.world.rank, n]) for n in range(4)]
        with pytest.raises(DataError) as refused:
            read(Batches(own), Position(0, 3), session=session)
        steps = read(Batches(own), Position(0, 4), session=session, num_epochs=1)
        return values(steps)[0][0], str(refused.value)

    for rank, (first, refused) in enumerate(on_ranks(job, 2)):
        assert first == [rank, 2]
        assert "3 ready batches were taken, which 2 readers cannot" in refused


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (DataLoader(Noise(), batch_size=2), {}, DataError, r"Batches\(loader\)"),
        (Batches([torch.zeros(1)]), {"workers": 1}, SettingError, "own loader"),
        (5, {}, DataError, "neither indexed"),
    ],
)
def test_what_kind_of_data_it_is(
    data: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    session: Any = ThreadSession()
    with pytest.raises(error, match=message):
        open_dataset(
            data,
            session,
            **{"seed": 0, "workers": 0, "global_batch": 2, "micro_batch": 2, **options},
        )
    with pytest.raises(SettingError, match="accumulation is 0"):
        Batches([], 0)

"""Streams: the same order for any number of readers, resuming, and the end of the data."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from drivetrain.data.positions import position_from_json, position_to_json
from drivetrain.data.sample_digest import digest_of
from drivetrain.data.stream import StreamLoader
from drivetrain.kernel.batches import ENDLESS, Group, Microbatch, Position
from drivetrain.kernel.errors import DataError, DataFailed, SettingError, WorkerFailed

quickly = settings(deadline=None, max_examples=50)


class Plain(IterableDataset[Any]):
    """A stream of `size` samples an epoch, which depend on the epoch that was set."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.size):
            yield self.epoch, index, random.random(), float(torch.rand(()))


class Shuffling(Plain):
    """A stream whose order depends on random numbers, as with a shuffle buffer."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[Any] = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) > 3:
                yield buffer.pop(random.randrange(len(buffer)))
        random.shuffle(buffer)
        yield from buffer


class Stateful(Plain):
    """A stream that resumes from its state, without reading the samples before."""

    at = 0
    num_read = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.at = self.at, 0
        for index in range(start, self.size):
            self.at = index + 1
            self.num_read += 1
            yield self.epoch, index, random.random(), float(torch.rand(()))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "nested": {"list": [None, True, 0.5]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def loader(stream: Any, **options: Any) -> StreamLoader:
    return StreamLoader(
        stream, **{"global_batch": 4, "micro_batch": 3, "collate": as_list, **options}
    )


Read = list[tuple[Group, list[Microbatch]]]


START = Position()


def read(source: StreamLoader, start: Position = START, num_steps: int = ENDLESS) -> Read:
    return [(group, list(group.microbatches)) for group in source.groups(start, num_steps)]


def samples(steps: Read) -> list[list[Any]]:
    """Return the samples of each step that count."""
    return [
        list(chain.from_iterable(each.batch[: each.num_samples] for each in parts))
        for _, parts in steps
    ]


def over_readers(stream: Any, num_readers: int, **options: Any) -> list[list[Any]]:
    readers = [
        samples(read(loader(stream, reader_index=i, num_readers=num_readers, **options)))
        for i in range(num_readers)
    ]
    return [list(chain.from_iterable(step)) for step in zip(*readers, strict=True)]


@quickly
@given(
    st.integers(1, 25),
    st.integers(1, 4),
    st.integers(4, 9),
    st.integers(1, 5),
    st.booleans(),
)
def test_any_number_of_readers_sees_the_same_steps(
    size: int, num_readers: int, global_batch: int, micro_batch: int, fixed_size: bool
) -> None:
    options = {"global_batch": global_batch, "num_epochs": 2, "seed": 7}
    whole = over_readers(Shuffling(size), 1, micro_batch=global_batch, **options)
    divided = over_readers(
        Shuffling(size), num_readers, micro_batch=micro_batch, fixed_size=fixed_size, **options
    )
    assert divided == whole
    assert [len(step) for step in whole] == [
        min(global_batch, size - start) for _ in range(2) for start in range(0, size, global_batch)
    ]
    assert sorted(sample[:2] for step in whole for sample in step) == [
        (epoch, index) for epoch in range(2) for index in range(size)
    ]


@quickly
@given(
    st.sampled_from([Plain, Shuffling, Stateful]),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.booleans(),
)
def test_a_resumed_stream_goes_on_where_it_was(
    kind: type[Plain], stops: list[int], drop_last: bool
) -> None:
    """Resume with a new object each time, as in a new process."""
    options: dict[str, Any] = {"num_epochs": 3, "drop_last": drop_last, "seed": 3}
    whole = samples(read(loader(kind(11), **options)))
    found, position = [], Position()
    for stop in [*stops, ENDLESS]:
        steps = read(loader(kind(11), **options), position, stop)
        found += samples(steps)
        if steps:
            stored = json.dumps(position_to_json(steps[-1][0].next))
            position = position_from_json(json.loads(stored))
    assert found == whole


def test_a_stateful_stream_is_not_read_again() -> None:
    position = read(loader(Stateful(20)), Position(), 3)[-1][0].next
    assert position == Position(0, 12, {"at": 12, "nested": {"list": [None, True, 0.5]}})
    again = Stateful(20)
    read(loader(again), position, 1)
    assert again.num_read == 5  # and one to know whether the epoch has more


def test_the_end_of_an_epoch_is_known_with_its_last_step() -> None:
    groups = [group for group, _ in read(loader(Plain(8), num_epochs=2))]
    assert [group.next for group in groups] == [
        Position(0, 4),
        Position(1),
        Position(1, 4),
        Position(2),
    ]


def test_dropping_the_last() -> None:
    steps = read(loader(Plain(11), num_epochs=2, drop_last=True))
    assert [group.num_samples for group, _ in steps] == [4, 4, 4, 4]
    assert [group.next for group, _ in steps][1::2] == [Position(1), Position(2)]
    with pytest.raises(DataError, match="none that fill a global batch"):
        read(loader(Plain(3), drop_last=True))


def test_a_function_makes_a_stream_for_each_epoch() -> None:
    made: list[int] = []

    def factory() -> Iterator[int]:
        made.append(len(made))
        return iter(range(5))

    assert samples(read(loader(factory, num_epochs=2))) == [[0, 1, 2, 3], [4]] * 2
    assert made == [0, 1]


def test_an_iterator_ends_where_it_ends() -> None:
    assert samples(read(loader(iter(range(6))))) == [[0, 1, 2, 3], [4, 5]]


def test_reading_leaves_the_generators_alone() -> None:
    random.seed(1), torch.manual_seed(1)
    expected = random.random(), float(torch.rand(()))
    random.seed(1), torch.manual_seed(1)
    read(loader(Shuffling(9), num_epochs=1))
    assert (random.random(), float(torch.rand(()))) == expected


# --- a worker ---------------------------------------------------------------------------------


class Pid(Plain):
    def __iter__(self) -> Iterator[int]:
        return iter([os.getpid()] * self.size)


class Killed(Plain):
    def __iter__(self) -> Iterator[int]:
        yield from range(6)
        os.kill(os.getpid(), signal.SIGKILL)


class Broken(Plain):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)
        raise KeyError("no such line")


@pytest.mark.parametrize("kind", [Shuffling, Stateful])
def test_a_worker_reads_the_same(kind: type[Plain]) -> None:
    alone = read(loader(kind(11), num_epochs=2))
    with_worker = read(loader(kind(11), num_epochs=2, workers=1))
    assert samples(with_worker) == samples(alone)
    assert [group.next for group, _ in with_worker] == [group.next for group, _ in alone]
    position = with_worker[1][0].next
    assert samples(read(loader(kind(11), workers=1), position, 2)) == samples(alone)[2:4]


def test_it_is_another_process() -> None:
    pids = set(chain.from_iterable(samples(read(loader(Pid(9), num_epochs=2, workers=1)))))
    assert len(pids - {os.getpid()}) == len(pids) == 1


def test_a_worker_that_dies_is_named() -> None:
    with pytest.raises(WorkerFailed, match=r"data worker \d+ \(exit code -9\)"):
        read(loader(Killed(9), workers=1))


def test_an_exception_in_the_worker_arrives_with_its_traceback() -> None:
    with pytest.raises(WorkerFailed, match="sample 5 of epoch 0") as caught:
        read(loader(Broken(9), workers=1))
    assert 'raise KeyError("no such line")' in str(caught.value)


# --- errors -----------------------------------------------------------------------------------


def test_an_exception_is_the_cause() -> None:
    with pytest.raises(DataFailed, match=r"sample 5 of epoch 0.*no such line") as caught:
        read(loader(Broken(9)))
    assert isinstance(caught.value.__cause__, KeyError)


def test_what_cannot_be_collated_is_named() -> None:
    def collate(samples: list[Any]) -> Any:
        raise ValueError("ragged")

    with pytest.raises(DataFailed, match=r"3 samples from offset 0 of epoch 0.*ragged"):
        read(loader(Plain(9), global_batch=3, collate=collate))


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": {"generator": torch.zeros(2)}}, r"\['a'\]\['generator'\] is a Tensor"),
        ({"a": {1: 2}}, r"\['a'\] has the key 1"),
        ({"a": [0, (1, 2)]}, r"\['a'\]\[1\] is a tuple"),
        ({"a": float("nan")}, r"\['a'\] is nan"),
        ({"$float": 1}, r"has the key '\$float'"),
        ([1], "is a list"),
    ],
)
def test_a_state_that_is_not_json_is_refused_by_its_key(state: Any, place: str) -> None:
    class Odd(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return state

    with pytest.raises(DataError, match=place):
        read(loader(Odd(9)), Position(), 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_became_shorter_is_refused(workers: int) -> None:
    with pytest.raises(DataError, match=r"8 samples of epoch 0 were consumed.*ends after 5"):
        read(loader(Plain(5), workers=workers), Position(0, 8))


@pytest.mark.parametrize(
    ("stream", "options", "error", "message"),
    [
        (5, {}, DataError, "int can be neither indexed"),
        (Plain(0), {}, DataError, "holds no samples"),
        (Plain(9), {"workers": 2}, SettingError, "data.workers is 2"),
        (Plain(9), {"num_readers": 5}, SettingError, "4 samples.*5 readers"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(
    stream: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read(loader(stream, **options))


def test_what_readers_have_read_is_identified_by_a_digest() -> None:
    """Compare digests. They differ for streams that are split by rank, or shuffled differently on
    each. Random numbers that each rank draws on its own do not matter.
    """

    def first(numbers: Any, readers: int = 2, index: int = 0) -> list[int]:
        stream = [{"n": torch.tensor(n), "noise": torch.rand(2)} for n in numbers]
        loader = StreamLoader(
            stream, global_batch=4, micro_batch=4, reader_index=index, num_readers=readers
        )
        return [group.digest for group in loader.groups(Position(), 2)]

    (reported, later) = first(range(12))
    assert (reported, later) == tuple(first(range(12), index=1)) and reported and not later
    assert reported not in (first(range(0, 24, 2))[0], first(range(1, 24, 2))[0])
    assert first(range(12), readers=1) == [0, 0]
    floats = [digest_of([torch.tensor([n / 2])]) for n in (1, 1, 2)]
    assert floats[0] == floats[1] != floats[2]
    assert digest_of([{"text": "a", "at": object()}]) == digest_of([{"text": "a", "at": object()}])

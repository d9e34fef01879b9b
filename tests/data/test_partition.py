"""Division into batches of one size: no sample is lost, and none counts twice."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.data.indexed import Loader
from drivetrain.data.partition import fitting_size, pad_by_repeating
from drivetrain.kernel.batches import Position, split_evenly

sizes = st.integers(1, 24)


@given(num_samples=st.integers(1, 100), size=sizes, num_readers=st.integers(1, 4))
def test_every_batch_has_the_size_and_every_sample_is_in_one(
    num_samples: int, size: int, num_readers: int
) -> None:
    readers = [pad_by_repeating(num_samples, size, i, num_readers) for i in range(num_readers)]
    assert len({len(parts) for parts in readers}) == 1
    counted = []
    for parts in readers:
        for part in parts:
            assert (part.stop - part.start) * part.repeats == size
            assert part.num_samples in (0, part.stop - part.start)
            assert 0 <= part.start < part.stop <= num_samples
            counted += list(range(part.start, part.start + part.num_samples))
    assert counted == list(range(num_samples))


@given(num_samples=st.integers(1, 100), micro_batch=sizes)
def test_the_fitting_size_needs_the_fewest_batches(num_samples: int, micro_batch: int) -> None:
    def batches(size: int) -> int:
        return len(pad_by_repeating(num_samples, size, 0, 1))

    chosen = fitting_size(num_samples, micro_batch)
    assert 1 <= chosen <= micro_batch
    others = range(1, min(micro_batch, num_samples) + 1)
    assert batches(chosen) == min(batches(size) for size in others)
    if num_samples <= micro_batch:
        assert chosen == num_samples


@given(num_samples=st.integers(1, 30), size=sizes, reader=st.integers(0, 1))
def test_weighed_sums_are_those_of_the_samples(num_samples: int, size: int, reader: int) -> None:
    data = [torch.tensor(float(3**index % 101)) for index in range(num_samples)]
    loader = Loader(
        data,
        global_batch=max(num_samples, 2),
        micro_batch=size,
        reader_index=reader,
        num_readers=2,
        fixed_size=True,
    )
    groups = loader.groups(Position(), 1)
    group = next(groups)
    parts = list(group.microbatches)
    assert all(len(part.batch) == size for part in parts)
    total = sum(float(part.batch.sum()) / part.repeats for part in parts if part.num_samples)
    order = loader.order(num_samples, 0, 0)
    start, length = split_evenly(num_samples, 2, reader)
    own = sum(float(data[index]) for index in order[start : start + length])
    assert abs(total - own) < 1e-3

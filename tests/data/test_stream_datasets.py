"""Streams of the datasets library: resumed in the middle of a shard, a buffer and an epoch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset

from drivetrain import ReadAgain
from drivetrain.data.positions import position_from_json, position_to_json
from drivetrain.data.stream import StreamLoader
from drivetrain.kernel.batches import ENDLESS, Position


def doubled(row: dict[str, int]) -> dict[str, int]:
    return {"y": 2 * row["x"]}


def in_shards() -> Any:
    rows = Dataset.from_dict({"x": list(range(23))})
    return rows.to_iterable_dataset(num_shards=4).map(doubled)


def shuffled() -> Any:
    return in_shards().shuffle(seed=3, buffer_size=5)


def mapped() -> Any:
    return in_shards().shuffle(seed=3, buffer_size=5).map(lambda row: row)


def in_epochs() -> Any:
    return ReadAgain(shuffled())


def interleaved() -> Any:
    from datasets import interleave_datasets

    return interleave_datasets([shuffled()])


def values(samples: list[dict[str, int]]) -> list[int]:
    return [sample["y"] for sample in samples]


def read(stream: Any, start: Position, num_steps: int) -> tuple[list[list[int]], Position]:
    """Return the samples of each step, and the position after them as a checkpoint keeps it."""
    loader = StreamLoader(stream, global_batch=4, micro_batch=4, num_epochs=2, collate=values)
    found, position = [], start
    for group in loader.groups(start, num_steps):
        found += [each.batch for each in group.microbatches]
        position = group.next
    return found, position_from_json(json.loads(json.dumps(position_to_json(position))))


@pytest.mark.parametrize("make", [in_shards, shuffled, mapped, in_epochs, interleaved])
@pytest.mark.parametrize("stops", [[3], [5, 1], [1, 2, 1, 3, 1]])
def test_it_goes_on_where_it_was(make: Callable[[], Any], stops: list[int]) -> None:
    whole, _ = read(make(), Position(), ENDLESS)
    for epoch in (whole[:6], whole[6:]):
        assert sorted(sum(epoch, [])) == list(range(0, 46, 2))
    assert (whole[:6] == whole[6:]) == (make is in_shards)  # shuffled again when the epoch is set
    found, position = [], Position()
    for stop in [*stops, ENDLESS]:
        steps, position = read(make(), position, stop)
        found += steps
    assert found == whole

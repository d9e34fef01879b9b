"""An index finds every file that contains a part of a region, and stays small for any number of
files.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.checkpoint.format import regions as geometry
from drivetrain.checkpoint.index.entries import Index, Stride
from drivetrain.kernel.errors import CheckpointDamaged
from drivetrain.kernel.shards import Box, Flat, Region, TensorInfo

from .fakes import regions, tilings

WEIGHT = "weights"


def whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def index_of(shape: tuple[int, ...], held: dict[int, list[Region | None]], radix: int) -> Index:
    """Return the index of a tensor `w` whose parts hold these regions, joined from `radix` indexes
    at a time.
    """
    indexes = []
    for part in sorted(held):
        index = Index()
        runs = [Stride(part, region or whole(shape)) for region in held[part]]
        index.add(WEIGHT, "w", TensorInfo(torch.float32, shape), runs)
        indexes.append(index)
    while len(indexes) > 1:
        groups = [indexes[i : i + radix] for i in range(0, len(indexes), radix)]
        for first, *others in groups:
            for other in others:
                first.join(other)
        indexes = [group[0] for group in groups]
    return indexes[0]


def overlap(a: Region | None, b: Region | None, shape: tuple[int, ...]) -> bool:
    return any(
        geometry.intersect(x, y)
        for x, _ in geometry.boxes(a, shape)
        for y, _ in geometry.boxes(b, shape)
    )


@st.composite
def stored(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[int, list[Region | None]]]:
    """Return a tensor's shape, and the regions of it that each part contains."""
    shape = draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
    pieces = draw(tilings(shape))
    parts = draw(st.lists(st.integers(0, 40), min_size=len(pieces), max_size=len(pieces)))
    held: dict[int, list[Region | None]] = {}
    for part, piece in zip(parts, pieces, strict=True):
        held.setdefault(part, []).append(piece)
    return shape, held


@given(stored(), st.integers(2, 5), st.data())
def test_no_file_that_a_region_lies_in_is_missed(
    what: tuple[tuple[int, ...], dict[int, list[Region | None]]], radix: int, data: st.DataObject
) -> None:
    shape, held = what
    wanted = data.draw(regions(shape))
    index = Index.from_bytes(index_of(shape, held, radix).to_bytes(), "index.json", 41)
    known = index.kinds[WEIGHT]["w"]
    found = known.parts(wanted)
    needed = {part for part, has in held.items() if any(overlap(r, wanted, shape) for r in has)}
    assert needed <= set(found) <= set(held)
    assert known.info == TensorInfo(torch.float32, shape)


@pytest.mark.parametrize("radix", [2, 16, 5000])
def test_a_partition_by_a_rule_is_a_line_or_two(radix: int) -> None:
    rows = {part: [Box((32 * part, 0), (32, 8))] for part in range(1000)}
    rows[1000] = [Box((32_000, 0), (7, 8))]
    index = index_of((32_007, 8), rows, radix)
    known = index.kinds[WEIGHT]["w"]
    assert len(known.runs) == 2
    assert known.parts(Box((3200, 0), (33, 8))) == [100, 101]
    assert known.parts(Flat(32 * 8 * 999 + 5, 32_007 * 8)) == [999, 1000]
    assert len(index.to_bytes()) < 400


def test_replicas_in_turn_and_flat_ranges_are_runs_too() -> None:
    flat = {7 + 3 * turn: [Flat(100 * turn, 100 * turn + 100)] for turn in range(50)}
    known = index_of((50, 100), flat, 16).kinds[WEIGHT]["w"]
    assert known.runs == [Stride(7, Flat(0, 100), 50, 3, (100,))]
    # a box of one row is one range; of one column, it crosses all
    assert known.parts(Box((20, 0), (1, 100))) == [67]
    assert known.parts(Box((0, 3), (50, 1))) == sorted(flat)


def test_parts_that_disagree_about_a_tensor_are_seen() -> None:
    index = Index()
    index.add(WEIGHT, "w", TensorInfo(torch.float32, (4,)), [Stride(0, Flat(0, 2))])
    with pytest.raises(ValueError, match="'w'"):
        index.add(WEIGHT, "w", TensorInfo(torch.float16, (4,)), [Stride(1, Flat(2, 4))])


SOUND = {
    "format": "drivetrain-index",
    "version": 1,
    "optimizer": {},
    "state": {},
    "weights": {
        "w": {
            "dtype": "F32",
            "shape": [8, 2],
            "runs": [{"part": 0, "flat": [0, 4], "count": 4, "every": 1, "by": [4]}],
        }
    },
}


def changed(path: tuple[Any, ...], value: Any) -> bytes:
    copy = json.loads(json.dumps(SOUND))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(copy).encode()


RUN = ("weights", "w", "runs", 0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), "other"),
        (("version",), 2),
        (("more",), {}),
        (("weights",), []),
        (("weights", "w"), None),
        (("weights", "w", "dtype"), "F7"),
        (("weights", "w", "dtype"), ["F32"]),
        (("weights", "w", "shape"), [8, -2]),
        (("weights", "w", "shape"), [1 << 62, 8]),
        (("weights", "w", "runs"), {}),
        (RUN, 7),
        ((*RUN, "part"), -1),
        ((*RUN, "part"), True),
        ((*RUN, "part"), 0.5),
        ((*RUN, "count"), 0),
        ((*RUN, "count"), 5),
        ((*RUN, "count"), 10**18),
        ((*RUN, "every"), 0),
        ((*RUN, "by"), [0]),
        ((*RUN, "by"), [-4]),
        ((*RUN, "by"), [4, 4]),
        ((*RUN, "by"), "4"),
        ((*RUN, "flat"), [4, 0]),
        ((*RUN, "flat"), [0, 10**30]),
        ((*RUN, "box"), [[0, 0], [1, 1]]),
    ],
)
def test_a_forged_index_is_refused(path: tuple[Any, ...], value: Any) -> None:
    assert Index.from_bytes(json.dumps(SOUND).encode(), "index.json", 100)
    with pytest.raises(CheckpointDamaged, match=r"index\.json"):
        Index.from_bytes(changed(path, value), "index.json", 4)


def test_every_part_of_a_random_partition_is_counted_once() -> None:
    sizes = [3, 1, 4, 1, 5, 9, 2, 6]
    edges = list(itertools.accumulate(sizes, initial=0))
    held = {part: [Flat(a, b)] for part, (a, b) in enumerate(itertools.pairwise(edges))}
    known = index_of((sum(sizes),), held, 3).kinds[WEIGHT]["w"]
    assert sum(run.count for run in known.runs) == len(sizes)
    assert known.parts(None) == sorted(held)


def test_tensors_that_lie_alike_are_apart() -> None:
    raw = changed(("weights", "v"), SOUND["weights"]["w"])
    first = Index.from_bytes(raw, "index.json", 100)
    first.kinds[WEIGHT]["v"].add(Stride(4, Flat(12, 16)))
    assert first.kinds[WEIGHT]["v"].parts(None) == [0, 1, 2, 3, 4]
    assert first.kinds[WEIGHT]["w"].parts(None) == [0, 1, 2, 3]

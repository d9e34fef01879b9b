"""Checks of a checkpoint's content take time linear in its size, not quadratic."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.checkpoint import Manifest
from drivetrain.checkpoint.catalog import Found, Retention
from drivetrain.checkpoint.format import strict_json
from drivetrain.checkpoint.format.regions import tile
from drivetrain.checkpoint.index.entries import Index
from drivetrain.kernel.errors import CheckpointDamaged
from drivetrain.kernel.shards import Box
from drivetrain.trainer.saves import stored_metrics


def a_key_twice(size: int) -> None:
    keys = b",".join(b'"%d":0' % number for number in range(size))
    strict_json.parse(b'{%s,"%d":0}' % (keys, size - 1), "x")


def much_under_a_long_key(size: int) -> None:
    strict_json.check({"k" * 10 * size: [0] * size})


def columns(size: int) -> None:
    assert tile([Box((0, n), (2, 1)) for n in range(size)], Box((0, 0), (2, size))) == ""


def columns_one_twice(size: int) -> None:
    boxes = [Box((0, n), (2, 1)) for n in range(size)]
    assert "overlap" in tile([*boxes, boxes[-1]], Box((0, 0), (2, size)))


def runs_of_many_pieces(size: int) -> None:
    run = {"part": 0, "flat": [0, 1], "count": size, "every": 1, "by": [1]}
    known = {"dtype": "F32", "shape": [1 << 40], "runs": [run] * size}
    value = {"state": {}, "optimizer": {}, "weights": {"w": known}}
    raw = json.dumps({"format": "drivetrain-index", "version": 1, **value}).encode()
    Index.from_bytes(raw, "x", size).kinds["weights"]["w"].parts(None)


@pytest.mark.parametrize(
    ("act", "size"),
    [
        (a_key_twice, 20_000),
        (much_under_a_long_key, 20_000),
        (columns, 2_000),
        (columns_one_twice, 2_000),
        (runs_of_many_pieces, 2_000),
    ],
)
def test_eight_times_as_much_takes_about_eight_times_as_long(
    act: Callable[[int], None], size: int
) -> None:
    def seconds(size: int) -> float:
        started = time.process_time()
        with contextlib.suppress(CheckpointDamaged):
            act(size)
        return time.process_time() - started

    once = min(seconds(size) for _ in range(3))
    assert min(seconds(8 * size) for _ in range(2)) < 25 * once + 0.1  # and 64 would be the square


boxes = st.lists(
    st.builds(
        lambda a, b, c, d: Box((min(a, b), min(c, d)), (abs(a - b) + 1, abs(c - d) + 1)),
        *[st.integers(0, 3)] * 4,
    ),
    max_size=5,
)


def points(box: Box) -> list[tuple[int, ...]]:
    ends = zip(box.offsets, box.sizes, strict=True)
    return list(itertools.product(*(range(start, start + size) for start, size in ends)))


@settings(deadline=None, max_examples=300)
@given(boxes, st.booleans())
def test_boxes_tile_where_each_point_lies_in_one(parts: list[Box], whole_too: bool) -> None:
    whole = Box((0, 0), (4, 4))
    covered = [point for part in parts for point in points(part)]
    if whole_too:  # what is left, point by point
        rest = [Box(point, (1, 1)) for point in points(whole) if point not in covered]
        parts = [*parts, *rest]
        covered = [point for part in parts for point in points(part)]
    problem = tile(parts, whole)
    assert (problem == "") is (sorted(covered) == points(whole))
    if len(covered) > len(set(covered)):
        assert "overlap" in problem
    elif problem:
        assert problem.startswith(f"{16 - len(covered)} elements")


@pytest.mark.parametrize("odd", [10**400, -(10**400), math.nan, "0.1", None, [0.1], True])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_odd_metrics_are_none(tmp_path, odd, mode) -> None:
    found = [
        Found(step, tmp_path / str(step), Manifest(step, (), {"metrics": {"loss": value}}))
        for step, value in enumerate([0.5, odd, 0.25, 10**300], 1)
    ]
    retention = Retention(keep_last=1, best_metric="loss", best_mode=mode)
    best = retention.best(found)
    usable = 4 if odd is True else 3
    assert len(best) == usable and best[0].step == (3 if mode == "min" else 4)
    assert len(retention.surplus(found)) == (2 if mode == "min" else 3)
    if odd is not True and not isinstance(odd, float):
        with pytest.raises(CheckpointDamaged, match="its metrics are malformed"):
            stored_metrics({"metrics": {"loss": odd}}, "x")

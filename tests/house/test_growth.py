"""The benchmark of growth: every figure in its tables was measured, on few ranks and samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
def test_everything_that_the_tables_show_was_measured(
    benchmark_module: Callable[[str], Any], tmp_path: Path
) -> None:
    growth = benchmark_module("growth")
    record = tmp_path / "growth.json"
    growth.main("2,3", "1000,100000", "1,2", times=4, document=False, json_file=record)
    found = json.loads(record.read_text())
    assert [each["ranks"] for each in found["ranks"]] == [2, 3]
    assert {each["workers"] for each in found["samples"]} == {0, 2}
    assert len(found["readers"]) == 2 * len(growth.KINDS)
    for table in growth.tables(found):
        head, line, *rows = table.splitlines()
        assert rows
        assert all(len(row.split("|")) == len(head.split("|")) for row in (line, *rows))
    for each in found["ranks"]:
        for name in ("shared", "tcp", "exchange"):
            assert 0 < each[name]["cpu"] < 1
            assert 0 < each[name]["wall"] < 1
    for each in (*found["samples"], *found["readers"]):
        assert each["cpu"] > 0
        assert each["first"] > 0


def test_every_reader_reads_all_of_a_stream(
    benchmark_module: Callable[[str], Any],
) -> None:
    growth = benchmark_module("growth")
    stream = growth.Stream()
    growth.read(stream, 4, 0, 5, 0)
    assert stream.read == 5 * 4 * growth.MICRO_BATCH + 1  # all of the steps, and one ahead

"""The benchmarks of defaults: all candidates of a benchmark do the same work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from few_cases import only_quick

HERE = ["optimizer", "clipping", "zero_grad", "fetching", "workers", "inference"]


@pytest.fixture
def defaults(benchmark_module: Callable[[str], Any]) -> Any:
    return {each.name: each for each in benchmark_module("defaults").BENCHMARKS}


@pytest.mark.parametrize("name", only_quick(HERE, ("optimizer", "fetching")))
def test_candidates_do_the_same_work(defaults: Any, name: str) -> None:
    benchmark = defaults[name]
    found = {each: benchmark.measure(each, True) for each in benchmark.candidates}
    sums = [figures["checksum"] for figures in found.values()]
    assert sums == pytest.approx([sums[0]] * len(sums), rel=1e-6)
    keys = {column.key for column in benchmark.columns}
    assert all(keys <= figures.keys() for figures in found.values())


@pytest.mark.slow
def test_views_of_buckets_save_memory(defaults: Any) -> None:
    measured = defaults["buckets"].rounds(1, True, lambda line: None)["measured"]
    (views,), (copies,) = measured["views"], measured["copies"]
    assert 0 < views["bytes"] < copies["bytes"]


@pytest.mark.slow
def test_what_is_compiled_trains_as_what_is_not(defaults: Any) -> None:
    measured = defaults["compiling"].rounds(1, True, lambda line: None)["measured"]
    assert list(measured) == ["none", "whole", "blocks"]  # sums of weights were compared

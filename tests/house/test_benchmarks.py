"""The benchmarks run with small sizes."""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from house_rules import ROOT


def measured(benchmark: str, candidate: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.one", benchmark, candidate, "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1].partition(": ")[2])
    return figures


def some(module: Any, *candidates: str) -> Any:
    """Return the benchmark of a step, with these candidates only."""
    (step,) = (each for each in module.BENCHMARKS if each.name == "step")
    return dataclasses.replace(step, candidates=dict.fromkeys(candidates, ""), blocks=2)


@pytest.mark.slow
def test_candidates_take_turns_and_do_the_same_work(benchmark_module: Callable[[str], Any]) -> None:
    benchmark, reported = some(benchmark_module("steps"), "tuned", "kernel"), []
    record = benchmark.rounds(1, True, reported.append)
    tuned, ours = (record["measured"][name] for name in ("tuned", "kernel"))
    assert (record["blocks"], len(tuned), len(ours)) == (2, 2, 2)
    sums = [block["checksum"] for block in tuned + ours]
    assert sums == pytest.approx(sums[:1] * 4, rel=1e-6)
    assert all(block["cpu"] > 0 for block in tuned + ours)


@pytest.mark.slow
def test_a_candidate_that_fails_ends_all_with_what_it_said(
    benchmark_module: Callable[[str], Any],
) -> None:
    benchmark = some(benchmark_module("steps"), "raw", "nobody")
    with pytest.raises(SystemExit, match=r"(?s)step: nobody failed:.*KeyError: 'nobody'"):
        benchmark.rounds(1, True, lambda line: None)


def test_a_spread_is_of_all_or_of_the_middle_half(benchmark_module: Callable[[str], Any]) -> None:
    spread = benchmark_module("harness").spread
    assert spread([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert spread([*map(float, range(9))]) == (2.0, 6.0)


def test_an_interval_holds_the_median_as_often_as_it_says(
    benchmark_module: Callable[[str], Any],
) -> None:
    """Compare with tables of the binomial distribution, and with draws."""
    interval = benchmark_module("harness").interval
    assert interval([*map(float, range(6))]) == (0.0, 5.0)
    assert interval([*map(float, range(20))]) == (5.0, 14.0)
    assert interval([2.0, 1.0, 3.0]) == (1.0, 3.0)
    draws = torch.rand(2000, 25, generator=torch.Generator().manual_seed(1)).tolist()
    held = sum(low <= 0.5 <= high for low, high in map(interval, draws))
    assert 0.94 < held / len(draws) < 0.98


@pytest.mark.slow
def test_a_load_gives_what_was_saved() -> None:
    assert measured("load", "kernel")["bytes"] < 64 << 20  # it compares sums of what it loads


@pytest.mark.slow
def test_a_followed_run_is_evaluated_while_it_trains(
    benchmark_module: Callable[[str], Any],
) -> None:
    (benchmark,) = benchmark_module("follow").BENCHMARKS
    benchmark = dataclasses.replace(benchmark, candidates={"followed": ""})
    blocks = benchmark.rounds(1, True, lambda line: None)["measured"]["followed"]
    assert len(blocks) == 2
    assert all(block["evaluated"] >= 1 for block in blocks)
    assert all(0 < block["cpu"] < 10 * block["wall"] for block in blocks)


def test_the_page_is_what_its_records_give() -> None:
    code = "from benchmarks import report; assert report.PAGE.read_text() == report.page()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"run: python docs/generate.py performance-page\n{done.stderr}"


def test_the_memory_that_a_plan_expects_is_near_the_measured_one() -> None:
    records = [
        json.loads((ROOT / f"docs/performance/{name}.json").read_text())
        for name in ("estimates", "estimates_ranks")
    ]
    every_round = [each for record in records for each in record["measured"].values()]
    errors = [abs(found["error"]) for rounds in every_round for found in rounds]
    assert len(errors) >= 20
    assert statistics.median(errors) <= 0.05
    assert max(errors) <= 0.10


def test_a_rank_correlation_is_of_places(benchmark_module: Callable[[str], Any]) -> None:
    def of(expected: list[float], measured: list[float]) -> float:
        pairs = zip(expected, measured, strict=True)
        rounds = {str(e): [{"expected": e, "measured": m}] for e, m in pairs}
        return float(benchmark_module("layouts").rank_correlation({"measured": rounds}))

    assert of([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1)
    assert of([1, 2, 3, 4], [40, 30, 20, 10]) == pytest.approx(-1)
    # SciPy's spearmanr
    assert of([1, 2, 3, 4], [10, 10, 30, 20]) == pytest.approx(0.7378647873726218)


@pytest.mark.slow
def test_the_memory_of_a_plan_is_measured() -> None:
    assert abs(measured("estimates", "autoencoder, cpu")["error"]) <= 0.10


def test_pages_are_measured(benchmark_module: Callable[[str], Any], tmp_path: Path) -> None:
    found = benchmark_module("pages").measure(tmp_path, 2 << 20)
    assert found["records"] > 4000
    assert found["more megabytes of memory"] < 50


def test_each_kind_of_corruption_is_planted_in_each_target(
    benchmark_module: Callable[[str], Any],
) -> None:
    """Require one corruption in each stretch of two steps, and both ranks."""
    module = benchmark_module("corruptions")
    planted = {driver: module.plants(driver) for driver in module.DRIVERS}
    stretches = [[(e.step + 1) // 2 for _, e in each] for each in planted.values()]
    assert stretches == [[*range(1, 13)]] * 5
    kinds = {(plant.target, plant.kind) for each in planted.values() for plant, _ in each}
    assert len(kinds) == 16
    ranks = {plant.rank for plant, _ in planted["fsdp"] if plant.target != "sample"}
    assert ranks == {"0", "1"}


def test_a_verdict_must_give_step_tensor_and_rank(benchmark_module: Callable[[str], Any]) -> None:
    module = benchmark_module("corruptions")
    first = {"step": 3, "quantity": "weight 1.weight", "where": "saved by rank 1"}
    expected = module.Expected(3, ("weight 1.weight",), "saved by rank 1")
    assert module.is_named(expected, {"outcome": "different", "first": first})
    for wrong in ({"step": 4}, {"quantity": "weight 3.weight"}, {"where": ""}):
        assert not module.is_named(expected, {"outcome": "different", "first": first | wrong})
    assert not module.is_named(expected, {"outcome": "equal"})
    on_all_ranks = module.Expected(3, ("weight 1.weight",), "")
    assert module.is_named(on_all_ranks, {"outcome": "different", "first": first})


@pytest.mark.slow
def test_planted_values_that_are_not_finite_are_named() -> None:
    figures = measured("nonfinite", "cpu")
    assert figures["planted"] == figures["named"] == 2
    assert figures["clean"] == 1 and not figures["named in clean"]

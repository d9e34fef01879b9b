"""Counts that noise cannot move stay within the committed budget: `python -m benchmarks.budget`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from house_rules import ROOT
from programs import program

from drivetrain import lost_ranks
from drivetrain.checkpoint.catalog import checkpoint_path


@pytest.fixture(scope="module")
def budget() -> Any:
    return program("budget", "benchmarks")


@pytest.mark.slow
def test_nothing_is_over_the_budget() -> None:
    command = [sys.executable, "-m", "benchmarks.budget"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    about = "mend it, or say why and run: python docs/generate.py budget"
    assert done.returncode == 0, f"{about}\n{done.stdout}{done.stderr}"


def test_an_update_keeps_what_varies_within_the_slack(budget: Any) -> None:
    old = {"a: own calls": 100, "b: own calls": 100, "c: own calls": 100, "d: own calls": 100}
    new = {"a: own calls": 105, "b: own calls": 106, "c: own calls": 50, "e: own calls": 1}
    assert budget.updated(new, old) == {**new, "a: own calls": 100}


def test_what_is_ours_may_grow_by_a_helper_function(budget: Any) -> None:
    counts = {"a: own calls": 100, "a: files opened": 10}
    assert budget.over(counts, counts) == []
    assert budget.over({**counts, "a: own calls": 105}, counts) == []
    (line,) = budget.over({**counts, "a: own calls": 106}, counts)
    assert line == "a: own calls: 106, and was 100 (+6)"
    assert budget.over({**counts, "a: files opened": 11}, counts)


def test_what_torch_has_a_part_in_has_some_slack(budget: Any) -> None:
    counts = {"a: calls above raw": -1000}
    assert budget.over({"a: calls above raw": -950}, counts) == []
    assert budget.over({"a: calls above raw": -900}, counts)


def test_a_count_that_only_one_side_knows_is_reported(budget: Any) -> None:
    assert budget.over({"a": 1}, {"b": 1}) == [
        "a: counted, and not in the budget",
        "b: in the budget, and not counted",
    ]


def test_the_committed_budget_is_sorted_and_whole() -> None:
    committed = json.loads((ROOT / "benchmarks" / "budget.json").read_text())
    assert list(committed) == sorted(committed)
    measured = {name.rpartition(": ")[0] for name in committed}
    assert measured >= {
        "compat, resuming",
        "import of drivetrain, fit",
        "import of drivetrain.compat",
        "kernel, 20 steps and 2 logs, accumulation 1",
        "kernel, resuming",
    }


def test_a_long_wait_for_another_rank_is_not_counted() -> None:
    count = program("counting", "benchmarks")
    counted = []
    for times in (1, 100):
        with count.calls() as calls:
            checkpoint_path(Path("run"), 1)
            for _ in range(times):
                lost_ranks.is_new()
        counted.append((calls.own > 0, calls.all))
    assert counted[0] == counted[1] and counted[0][0]

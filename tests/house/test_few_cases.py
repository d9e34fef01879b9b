"""The quick cases of a test with many that are alike, in a scratch suite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scratch_suites import run

SUITE = """
import pytest
from few_cases import only_quick

@pytest.mark.few(3)
@pytest.mark.parametrize("case", [pytest.param("x", marks=pytest.mark.slow), *range(9)])
def test_alike(case): pass

@pytest.mark.few(2)
@pytest.mark.parametrize("case", ["a"])
def test_fewer(case): pass

@pytest.mark.parametrize("case", only_quick("bcd", ("c",)))
def test_named(case): pass

@pytest.mark.parametrize(("one", "two"), only_quick([("e", 1), ("f", 2)], lambda case: case[1] > 1))
def test_of_two_arguments(one, two): pass
"""


@pytest.mark.parametrize(
    ("which", "found"),
    [
        ("not slow", ["0", "3", "6", "a", "c", "f-2"]),
        ("slow", [*"124578", "b", "d", "e-1", "x"]),
    ],
)
def test_the_quick_cases_are_spread_over_all(tmp_path: Path, which: str, found: list[str]) -> None:
    options = ("-v", "-m", which, "-p", "no:warnings")
    _, printed = run(tmp_path, {"test_a.py": SUITE}, *options, plugin="few_cases")
    assert sorted(re.findall(r"PASSED test_a\.py::test_\w+\[([\w-]+)\]", printed)) == found, printed

"""The quick cases of a test with many that are alike, in a scratch suite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from few_cases import only_quick
from scratch_suites import run

SUITE = """
import pytest

@pytest.mark.few(3)
@pytest.mark.parametrize("case", [pytest.param("x", marks=pytest.mark.slow), *range(9)])
def test_alike(case): pass

@pytest.mark.few(2)
@pytest.mark.parametrize("case", ["a"])
def test_fewer(case): pass
"""


@pytest.mark.parametrize(
    ("which", "found"), [("not slow", ["0", "3", "6", "a"]), ("slow", [*"124578", "x"])]
)
def test_the_quick_cases_are_spread_over_all(tmp_path: Path, which: str, found: list[str]) -> None:
    options = ("-v", "-m", which, "-p", "no:warnings")
    _, printed = run(tmp_path, {"test_a.py": SUITE}, *options, plugin="few_cases")
    assert sorted(re.findall(r"PASSED test_a\.py::test_\w+\[(\w)\]", printed)) == found, printed


def test_cases_that_are_not_named_are_slow() -> None:
    cases = only_quick(["a", "b"], ("b",)) + only_quick(
        [("c", 1), ("d", 2)], lambda case: case[1] > 1
    )
    assert [(case.values, [mark.name for mark in case.marks]) for case in cases] == [
        (("a",), ["slow"]),
        (("b",), []),
        (("c", 1), ["slow"]),
        (("d", 2), []),
    ]

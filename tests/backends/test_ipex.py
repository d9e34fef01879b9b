"""The ipex driver keeps the laws, and has tests of its own peculiarities."""

from __future__ import annotations

import pytest
from environments import python_of_all
from quick_cases import is_quick

from drivetrain.backends.ipex import driver
from drivetrain.conformance import Case, cases
from drivetrain.kernel.plan import Plan


@pytest.mark.usefixtures("environment_of_all")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[] if is_quick(case) else pytest.mark.slow)
        for case in cases("ipex", peers=["cpu", "ddp:2"], python=python_of_all())
    ],
)
def test_laws(case: Case) -> None:
    case.check()


def test_the_probe_names_what_to_use_instead() -> None:
    reason = driver.probe().reason
    for word in ("upstream ended", "backend cpu", "backend xpu"):
        assert word in reason


def test_other_than_trained_precisions_are_not_declared() -> None:
    assert driver.capabilities(Plan()).precisions == {"fp32", "bf16"}

"""The driver `accelerator` keeps the laws on a simulated device, and faults of the device are
caught.
"""

from __future__ import annotations

import pytest
from device_faults import FAULTS
from few_cases import only_quick
from planted_drivers import broken
from quick_cases import is_quick

from drivetrain.conformance import Case, cases


@pytest.mark.parametrize(
    "case",
    only_quick(cases("simulated", peers=["cpu"]), is_quick),
    ids=str,
)
def test_laws(case: Case) -> None:
    case.check()


SHOWN = ("a copy is read too early", "the state of random numbers is not saved")
"""Faults that the quick part of the tests plants, too."""


@pytest.mark.parametrize("fault", only_quick(FAULTS, SHOWN))
def test_a_fault_of_the_device_is_caught(fault: str) -> None:
    found = cases("simulated", options={"fault": fault}, peers=["cpu"])
    assert any(broken(case) for case in found if str(case).startswith(FAULTS[fault].caught_by))

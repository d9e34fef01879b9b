"""Tests of the driver `accelerator` that need no device; the laws are proved on a simulated one
(tests/simulated), and here on a machine that has one.
"""

from __future__ import annotations

import pytest
import torch

from drivetrain.backends.accelerator import AcceleratorOptions, driver
from drivetrain.backends.common.accelerators import facts_of
from drivetrain.conformance import Case, cases
from drivetrain.kernel.errors import BackendUnavailable, SettingError
from drivetrain.kernel.plan import Plan
from drivetrain.registry import usable_driver

without_device = pytest.mark.skipif(driver.probe().usable, reason="there is an accelerator")


@pytest.mark.skipif(not driver.probe().usable, reason=driver.probe().reason)
@pytest.mark.parametrize("case", cases("accelerator", allow_unavailable=True), ids=str)
def test_laws(case: Case) -> None:
    case.check()


@without_device
def test_it_is_refused_with_the_reason() -> None:
    with pytest.raises(BackendUnavailable, match=r"backend 'accelerator' cannot run here: .+"):
        usable_driver("accelerator")
    with pytest.raises(BackendUnavailable, match="cannot run here"), driver.open(Plan()):
        pass


@without_device
def test_probing_starts_nothing() -> None:
    assert driver.probe().versions == {"torch": torch.__version__}
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def test_an_unknown_device_is_taken_to_do_the_least() -> None:
    assert facts_of("unheard-of").precisions == {"fp32"}
    assert not facts_of("unheard-of").streams


def test_an_index_below_zero_is_refused() -> None:
    with pytest.raises(SettingError, match=r"backend\.index"):
        AcceleratorOptions(index=-1)

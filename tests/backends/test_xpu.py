"""Tests of the xpu driver that need no device; the laws are proved on a machine that has one."""

from __future__ import annotations

import pytest
import torch

from drivetrain.backends.xpu import driver
from drivetrain.conformance import Case, cases
from drivetrain.kernel.errors import BackendUnavailable, SettingError
from drivetrain.kernel.plan import Plan
from drivetrain.registry import usable_driver
from drivetrain.trainer.setting_values import override

without_device = pytest.mark.skipif(driver.probe().usable, reason="there is an Intel GPU")


@pytest.mark.skipif(not driver.probe().usable, reason=driver.probe().reason)
@pytest.mark.parametrize("case", cases("xpu", allow_unavailable=True), ids=str)
def test_laws(case: Case) -> None:
    case.check()


@without_device
def test_it_is_refused_with_the_reason_and_the_remedy() -> None:
    with pytest.raises(BackendUnavailable, match=r"backend 'xpu' cannot run here: .+"):
        usable_driver("xpu")
    with pytest.raises(BackendUnavailable, match="cannot run here"), driver.open(Plan()):
        pass


@without_device
def test_probing_starts_nothing() -> None:
    assert driver.probe().versions == {"torch": torch.__version__}
    assert not torch.distributed.is_initialized()


def test_capabilities_touch_no_device() -> None:
    able = driver.capabilities(Plan())
    assert able.multi_process
    assert able.feeds_ahead
    assert able.precisions == {"fp32", "bf16", "fp16"}


def test_options_are_parsed_and_unknown_ones_refused() -> None:
    options = override(
        driver.options_type(), {"bucket_cap_mb": "8", "static_graph": "true"}, "backend."
    )
    assert options == driver.options_type(bucket_cap_mb=8, static_graph=True)
    with pytest.raises(SettingError, match=r"backend\.bucket_cap; did you mean"):
        override(driver.options_type(), {"bucket_cap": "8"}, "backend.")

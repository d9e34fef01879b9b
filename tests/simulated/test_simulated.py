"""The drivers `accelerator`, and `ddp` on two ranks, keep the laws on simulated devices, and faults
of the devices are caught.
"""

from __future__ import annotations

import pytest
from device_faults import FAULTS, FAULTS_OF_RANKS
from few_cases import only_quick
from planted_drivers import broken
from quick_cases import is_quick

from drivetrain.conformance import Case, cases
from drivetrain.conformance.fork_server import WorkerFailure


@pytest.mark.parametrize(
    "case",
    only_quick(cases("simulated", peers=["cpu"]), is_quick),
    ids=str,
)
def test_laws(case: Case) -> None:
    case.check()


QUICK = (
    "1_gradient-plain_sgd_equals_one_process-regression",
    "6_resume-resumed_run_is_bit_exact-stops=2_7",
    "session-ranks_tell_each_other",
)
PINS = "1_turns-each_update_trains_its_own_models"
"""Here DDP looks for parameters that took no part, by a copy from page-locked memory."""


@pytest.mark.parametrize(
    "case",
    only_quick(
        cases("simulated_ranks", num_processes=2, peers=["cpu"]), lambda case: str(case) in QUICK
    ),
    ids=str,
)
def test_laws_on_two_ranks(case: Case, request: pytest.FixtureRequest) -> None:
    if str(case) == PINS:
        reason = "the simulated device has no page-locked memory"
        request.applymarker(pytest.mark.xfail(raises=WorkerFailure, strict=True, reason=reason))
    case.check()


SHOWN = ("a copy is read too early", "the state of random numbers is not saved")
"""Faults that the quick part of the tests plants, too."""


@pytest.mark.parametrize("fault", only_quick(FAULTS, SHOWN))
def test_a_fault_of_the_device_is_caught(fault: str) -> None:
    found = cases("simulated", options={"fault": fault}, peers=["cpu"])
    assert any(broken(case) for case in found if str(case).startswith(FAULTS[fault].caught_by))


@pytest.mark.parametrize("fault", only_quick(FAULTS_OF_RANKS, ("sums over ranks are lost",)))
def test_a_fault_of_collectives_is_caught(fault: str) -> None:
    found = cases("simulated_ranks", num_processes=2, options={"fault": fault}, peers=["cpu"])
    caught_by = FAULTS_OF_RANKS[fault].caught_by
    assert any(broken(case) for case in found if str(case).startswith(caught_by))

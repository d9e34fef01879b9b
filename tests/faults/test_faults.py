"""Each planted fault is caught by the check that is meant for it, and only because of the fault."""

import re

import pytest
from faults import BUFFERS, FAULTS, RESUMED, SAME_BITS, SGD, THREE_TOGETHER
from few_cases import only_quick
from planted_drivers import broken

from drivetrain.conformance import Case, cases
from drivetrain.conformance.judge import LawBroken


def chosen(fault: str, by: str) -> list[Case]:
    found = cases("faulty", num_processes=2, options={"fault": fault}, peers=["faulty:2"])
    return [case for case in found if str(case).startswith(by)]


def law_of(check: str) -> str:
    return check.partition("-")[0]


QUICK = {law_of(fault.caught_by): name for name, fault in reversed(FAULTS.items())}
"""The first fault of each law. Other faults are slow."""


@pytest.mark.parametrize("fault", only_quick(FAULTS, QUICK.values()))
def test_fault_is_caught(fault: str) -> None:
    assert any(broken(case) for case in chosen(fault, FAULTS[fault].caught_by))


def test_draws_of_evaluation_are_reported_by_generator() -> None:
    case = chosen("random state not put back", SAME_BITS)[0]
    with pytest.raises(LawBroken, match=r"drew random numbers .* 'torch' of rank 0"):
        case.check()


@pytest.mark.parametrize("check", THREE_TOGETHER)
def test_three_faults_together_are_each_named(check: str) -> None:
    case = chosen("three together", check)[0]
    with pytest.raises(LawBroken, match=re.escape(THREE_TOGETHER[check])):
        case.check()


def test_a_model_that_cannot_be_partitioned_has_a_stand_in() -> None:
    """Prove the stand-in in place of the model, and report it."""
    case = chosen("takes sequences", SGD + "-regression")[0]
    case.check()
    assert case.refused is None
    (why,) = case.to_json()["subject"]["stand_ins"].values()
    assert why.startswith("regression in parts: backend.fault is set")


def test_a_model_that_nothing_stands_in_for_is_refused() -> None:
    case = chosen("takes sequences", BUFFERS)[0]
    case.check()
    assert case.refused is not None
    assert case.refused.message.startswith("backend.fault is set")


@pytest.mark.parametrize("check", [SGD + "-regression", SGD + "-language", RESUMED])
def test_who_refuses_all_has_proved_nothing(check: str) -> None:
    case = chosen("refuses all", check)[0]
    with pytest.raises(
        LawBroken, match="has layers, sequences and experts to partition, but backend"
    ):
        case.check()


@pytest.mark.slow  # as ddp, which the driver with a fault wraps, is proved in each run
@pytest.mark.parametrize("check", sorted({fault.caught_by for fault in FAULTS.values()}))
def test_without_a_fault_nothing_is_caught(check: str) -> None:
    found = chosen("none", check)
    assert found
    assert not any(broken(case) for case in found)


@pytest.mark.parametrize(
    "check",
    [
        "1_gradient-low_precision_stays_near",
        "2_norm-norm_is_unscaled",
        "2_norm-clipping_limits_each_element",
        "7_capabilities-compilation",
        "7_capabilities-activation_checkpointing",
        "7_capabilities-stall_seconds",
        "7_capabilities-timeout_seconds",
    ],
)
def test_what_is_not_declared_is_refused(check: str) -> None:
    for case in chosen("modest", check):
        case.check()
        assert case.refused is not None
        assert "'faulty' refuses" in case.refused.message

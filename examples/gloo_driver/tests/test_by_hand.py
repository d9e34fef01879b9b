import pytest

from drivetrain.conformance import Case, cases


@pytest.mark.parametrize("case", cases("by_hand"), ids=str)
def test_laws(case: Case) -> None:
    case.check()

"""The cpu driver keeps the laws."""

import pytest

from drivetrain.conformance import Case, cases


@pytest.mark.parametrize("case", cases("cpu", peers=["cpu", "ddp:2"]), ids=str)
def test_laws(case: Case) -> None:
    case.check()

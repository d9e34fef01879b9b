"""Proves that a driver keeps the laws of drivetrain; run it against any driver, yours included.

From a shell::

    python -m drivetrain.conformance --backend NAME

or as a test file of the driver's own package::

    import pytest
    from drivetrain.conformance import Case, cases

    @pytest.mark.parametrize("case", cases("NAME"), ids=str)
    def test_laws(case: Case) -> None:
        case.check()

`NAME` is what the driver is called in the entry-point group `drivetrain.backends`.
"""

# absolute: pytest may import this package as `conformance`, after the folder that holds it
from drivetrain.conformance.cases import Case, cases
from drivetrain.conformance.subject import Subject

__all__ = ["Case", "Subject", "cases"]

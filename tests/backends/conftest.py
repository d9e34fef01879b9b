"""Fixtures of the drivers' tests."""

from __future__ import annotations

import pytest
from environments import build_all


@pytest.fixture(scope="session")
def environment_of_all() -> None:
    """The interpreter that `python_of_all` names exists."""
    build_all()

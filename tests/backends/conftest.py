"""Fixtures of the drivers' tests."""

from __future__ import annotations

import pytest
from environments import build_all


@pytest.fixture(scope="session")
def environment_of_all() -> None:
    """Make sure that the interpreter of `python_of_all` exists."""
    build_all()

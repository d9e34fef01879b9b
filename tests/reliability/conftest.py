"""Runs that tests of several files compare theirs with."""

from __future__ import annotations

from pathlib import Path

import pytest

from .dying_ranks import UNDISTURBED, train


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run of `dying_ranks`."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(out, settings=UNDISTURBED)
    return out

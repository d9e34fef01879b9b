from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_disks():
    """Thousands of saves would wait for the disk; that and when they sync is tested by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield

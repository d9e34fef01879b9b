from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_disks():
    """Skip fsync: thousands of saves would wait for the disk. Tests of syncing replace `os.fsync`
    themselves.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield

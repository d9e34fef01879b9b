"""Registers the faulty driver as any package registers one: by an entry point."""

import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from drivetrain.conformance.harness import Pool, lend
from drivetrain.kernel.registry import ENTRY_POINT_GROUP

_folder = tempfile.TemporaryDirectory()
_info = Path(_folder.name) / "faulty_driver-0.dist-info"
_info.mkdir()
(_info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-driver\nVersion: 0\n")
(_info / "entry_points.txt").write_text(
    f"[{ENTRY_POINT_GROUP}]\nfaulty = faulty:driver\nunavailable = faulty:unavailable\n"
)

# the ranks that a harness starts take over this path, so they find the driver by its name
sys.path += [_folder.name, str(Path(__file__).parent)]


@pytest.fixture(autouse=True)
def _one_pool_for_all_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault is chosen anew in each session: ranks need not start again for the next one."""

    def lend_one(kind: str, size: int, python: str | None) -> AbstractContextManager[Pool]:
        return lend("faulty", size, python)

    monkeypatch.setattr("drivetrain.conformance.subject.lend", lend_one)

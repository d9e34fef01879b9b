"""Drivers with planted faults: they are registered, and a law is broken by them or not."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from drivetrain.conformance import Case
from drivetrain.conformance.judge import LawBroken

_folders: list[tempfile.TemporaryDirectory[str]] = []


def register(package: str, entry_points: str, folder: Path) -> None:
    """Register drivers as any package registers its own: by entry points. `folder` holds them.

    The ranks that a harness starts take over the path, so they find the drivers by name.
    """
    registered = tempfile.TemporaryDirectory()
    _folders.append(registered)  # kept for the life of the process
    info = Path(registered.name) / f"{package.replace('-', '_')}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(entry_points)
    # what the backends' own tests define is used here, too
    sys.path += [registered.name, str(folder), str(folder.parent / "backends")]


def broken(case: Case) -> bool:
    """Return True if the law is broken. A crash is not a finding: it fails the test."""
    try:
        case.check()
    except LawBroken:
        return True
    return False

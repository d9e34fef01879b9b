"""`drivetrain conform`: the suite that proves a driver, which comes with the library."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

from ..kernel.errors import UsageError

__all__ = ["conform"]

SUITE = "drivetrain.conformance"


def conform(backend: str, arguments: Sequence[str]) -> int:
    """Run the suite on a driver, in a process of its own; pytest's exit code."""
    if importlib.util.find_spec("pytest") is None:
        raise UsageError(
            "the conformance suite needs pytest, which is not installed; install it with: "
            f"{sys.executable} -m pip install pytest"
        )
    from ..kernel.registry import find_driver

    find_driver(backend)  # raises UnknownBackend with the nearest name
    command = [sys.executable, "-m", SUITE, f"--backend={backend}"]
    return subprocess.run([*command, *arguments], check=False).returncode

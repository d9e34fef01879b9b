"""`drivetrain conform`: the suite that proves a driver, which comes with the library."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping, Sequence

from ..kernel.errors import UsageError

__all__ = ["conform"]

SUITE = "drivetrain.conformance"


def conform(
    backend: str,
    options: Mapping[str, object],
    flags: Mapping[str, bool],
    arguments: Sequence[str] = (),
) -> int:
    """Run the suite on a driver, in a process of its own; pytest's exit code. `options`: by their
    names, lists of those that were given more than once. `arguments`: pytest's own."""
    if importlib.util.find_spec("pytest") is None:
        raise UsageError(
            "the conformance suite needs pytest, which is not installed; install it with: "
            f"{sys.executable} -m pip install pytest"
        )
    from ..kernel.registry import find_driver

    find_driver(backend)  # raises UnknownBackend with the nearest name
    command = [sys.executable, "-m", SUITE, f"--backend={backend}"]
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        command += [f"{name}={each}" for each in values if each is not None]
    command += [name for name, given in flags.items() if given]
    return subprocess.run([*command, *arguments], check=False).returncode

"""Lets pytest run the conformance suite by its name; nothing happens in any other run.

    pytest --pyargs drivetrain.conformance --backend NAME

pytest reads no options from an installed package's `conftest.py`, and loading the suite's plugin in
every run of a user's pytest would import torch there.
"""

from __future__ import annotations

from typing import Any

__all__ = ["pytest_load_initial_conftests"]

SUITE = "drivetrain.conformance"


def pytest_load_initial_conftests(early_config: Any, args: list[str]) -> None:
    """Load the suite's plugin when the suite is among the arguments."""
    if any(argument.startswith(SUITE) for argument in args):
        early_config.pluginmanager.import_plugin(f"{SUITE}.plugin")

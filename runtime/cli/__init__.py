"""The command line. It uses the library's public functions and adds nothing that they lack.

This module stays light, so that `drivetrain --help` answers at once; torch comes with a command.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """The console script `drivetrain`."""
    if sys.argv[1:2] == ["train"]:
        from .process.early_signals import handle_early

        handle_early()
    from ..run.output import drain_output
    from .app import app

    try:
        app(prog_name="drivetrain")
    finally:
        drain_output()

"""The command line. It uses the library's public functions and adds nothing that they lack.

This module stays light, so that `drivetrain --help` answers at once; torch comes with a command.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """The console script `drivetrain`."""
    from .app import app
    from .output import let_go

    try:
        app(prog_name="drivetrain")
    finally:
        let_go()

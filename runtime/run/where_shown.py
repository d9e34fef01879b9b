"""Detects where this process's output is shown; imports the standard library alone."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["in_notebook", "script_command"]


def in_notebook() -> bool:
    """True if a Jupyter kernel runs this process: IPython then has an application of its own."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


def script_command(otherwise: str) -> list[str]:
    """Return the words of the command of the script that runs; `otherwise`, if there is none."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if in_notebook() or script is None or not Path(script).is_file():
        return [otherwise]
    return ["python", *sys.argv]

"""Detects where this process's output is shown; imports the standard library alone."""

from __future__ import annotations

import sys

__all__ = ["in_notebook"]


def in_notebook() -> bool:
    """True if a Jupyter kernel runs this process: IPython then has an application of its own."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config

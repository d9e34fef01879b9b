"""Names that torch keeps private, and may rename in any version.

`tests/house/private_interfaces.json` lists all such names, and why each is used.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ..kernel.errors import LibraryUnsupported

__all__ = ["TRIED", "private_name", "unsupported"]

TRIED = ("2.8", "2.15")
"""Oldest and newest torch that drivetrain is tried with: `docs/compatibility.md` has the results.
"""

_REQUIRED = object()


def private_name(module: str, name: str, default: Any = _REQUIRED, *, purpose: str = "") -> Any:
    """Return a private name of one of torch's modules.

    If this torch does not have the name, return `default`. Without a default, raise
    `LibraryUnsupported`, whose message gives `purpose`. Such a call belongs inside the function
    that needs the name, where it does not end an import.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        if default is not _REQUIRED:
            return default
        raise unsupported(f"{module}.{name}", purpose) from error


def unsupported(name: str, purpose: str) -> LibraryUnsupported:
    """Return the error to raise if this torch has no such name. `purpose`: what needs the name."""
    oldest, newest = TRIED
    return LibraryUnsupported(
        f"torch {torch.__version__} has no {name}, which {purpose} needs. drivetrain is tried with "
        f"torch {oldest} to {newest}: install one of these, such as `pip install "
        f"'torch>={oldest},<={newest}'`, or a drivetrain that knows torch {torch.__version__}"
    )

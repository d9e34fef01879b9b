"""Imports parts of transformers on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["theirs"]


def theirs(module: str, name: str) -> Any:
    """Import `name` from `transformers.<module>`. Raises ImportError, naming it, if it
    is missing.
    """
    try:
        return getattr(import_module(f"transformers.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(f"{name} is transformers' own: pip install transformers") from error

"""Helpers of a hyper-parameter search: its objective, its library, and the values of a trial."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from ..enums import HPSearchBackend
from .search_libraries import LIBRARIES

__all__ = ["default_compute_objective", "installed_backend", "set_argument"]

_LOG = logging.getLogger(__name__)

_NO_METRICS = re.compile(r"epoch|eval_loss|.*_(runtime|per_second|time)|.*_mem_.*")
"""Keys about the run and not about the quality of the model."""


def default_compute_objective(metrics: Mapping[str, float]) -> float:
    """Return the sum of all metrics except the loss, or the loss if there are no others.

    Times, speeds and memory are not counted, nor the epoch.
    """
    rest = [value for name, value in metrics.items() if not _NO_METRICS.fullmatch(name)]
    return sum(rest) if rest else metrics["eval_loss"]


def installed_backend(backend: str | HPSearchBackend | None = None) -> HPSearchBackend:
    """Return the library named `backend`, or the first that is installed.

    Raises ValueError for an unknown name, and RuntimeError for a library that is not installed.
    """
    if backend is None:
        return _first_installed()
    chosen = HPSearchBackend(backend)
    library = LIBRARIES[chosen]
    if find_spec(library.module) is None:
        raise RuntimeError(f"{chosen.value} is not installed: pip install {library.package}")
    return chosen


def set_argument(args: Any, name: str, value: Any) -> None:
    """Set an argument to a trial's value, converted to the argument's type. Warns about unknown
    arguments."""
    if not hasattr(args, name):
        _LOG.warning("the trial sets %s=%r, and there is no such argument", name, value)
        return
    old = getattr(args, name)
    setattr(args, name, value if old is None else type(old)(value))


def _first_installed() -> HPSearchBackend:
    for name, library in LIBRARIES.items():
        if find_spec(library.module) is not None:
            return name
    packages = ", ".join(library.package for library in LIBRARIES.values())
    raise RuntimeError(f"no library for searches is installed; pip install one of {packages}")

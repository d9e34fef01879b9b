"""The result of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..kernel.paths import Place
from .settings import Settings

__all__ = ["Result", "RetryWithSmallerBatch"]


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    step: int
    reason: str
    """`finished`, `stopped` or `preempted`."""
    loss: float
    """The last one logged; NaN when none was."""
    metrics: Mapping[str, Mapping[str, float]]
    """The last ones of each evaluation data set."""
    checkpoint: Place | None
    """The newest that this run saved or resumed from."""
    finish: Any = None
    """The return value of `finish`."""
    save_error: str = ""
    """Why the last checkpoint that was to be saved is not there."""


@dataclass(frozen=True)
class RetryWithSmallerBatch:
    """The smaller batch to continue with where memory ran out."""

    settings: Settings
    resume: Place | None
    """From what the run itself saved; None: as it began."""

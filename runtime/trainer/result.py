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
    """The last loss that was logged; NaN if none was."""
    metrics: Mapping[str, Mapping[str, float]]
    """The latest metrics of each evaluation data set."""
    checkpoint: Place | None
    """The newest checkpoint that this run saved or resumed from."""
    finish: Any = None
    """The return value of `finish`."""
    save_error: str = ""
    """Why the last attempt to save failed; empty if it succeeded."""
    num_saved: int = 0
    """Checkpoints that this run wrote."""
    best: Place | None = None
    """The best checkpoint by `checkpoint.best_metric`; None if no checkpoint has that metric."""


@dataclass(frozen=True)
class RetryWithSmallerBatch:
    """The smaller batch to continue with after memory ran out."""

    settings: Settings
    resume: Place | None
    """Resume from a checkpoint that the run saved itself; None: resume as the run began."""

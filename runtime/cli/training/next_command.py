"""The command that continues a run, ready to paste."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Any

from ...kernel.contract import Driver
from ...kernel.errors import DrivetrainError
from ...kernel.paths import Place
from ...kernel.plan import Plan
from ...registry import accelerators, find_driver, known_backends
from ..process.program import program

__all__ = ["NOT_KEPT", "next_command"]

NOT_KEPT = "DRIVETRAIN_NOT_KEPT"
"""Environment: set where the run's folder is temporary."""


def next_command(folder: Place, started: Mapping[str, Any], reason: str) -> str:
    """Return the command that resumes a run; one that finished, on another driver and for longer.
    Empty where the run's folder is temporary."""
    if NOT_KEPT in os.environ:
        return ""
    words = ["--resume", str(folder)]
    backend, ranks, total = started["backend"], started["world"]["size"], started["total_steps"]
    if reason == "finished":
        settings = started["settings"]
        batch = settings.get("data", {}).get("batch_warmup_from") or settings["global_batch"]
        backend, ranks = _another(backend, ranks, batch) or (backend, ranks)
    words += ["--backend", backend]
    if ranks > 1:
        words += ["--nproc", str(ranks)]
    if reason == "finished" and total is not None:
        words += ["--steps", str(total + max(1, total // 5))]
    return shlex.join([*program(), "train", *words])


def _another(backend: str, ranks: int, global_batch: int) -> tuple[str, int] | None:
    """Find a usable driver for two ranks after a run on one, or for one rank after several."""
    wanted = 2 if ranks == 1 else 1
    if wanted > global_batch:
        return None
    for name in known_backends():
        try:
            driver = find_driver(name)
        except DrivetrainError:
            continue
        if name != backend and _can_run(driver, wanted):
            return name, wanted
    return None


def _can_run(driver: Driver, ranks: int) -> bool:
    probe = driver.probe()
    most = len(accelerators(probe)) or ranks
    if not probe.usable or ranks > most:
        return False
    return ranks == 1 or driver.capabilities(Plan()).multi_process

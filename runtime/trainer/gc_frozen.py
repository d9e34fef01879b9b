"""Short pauses for Python's garbage collector while a run trains."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["survivors_frozen"]

_OLDEST = 2


@contextmanager
def survivors_frozen() -> Iterator[None]:
    """Freeze, until the block ends, what survives the first full collection in it.

    Modules, model and data make up nearly all objects of a process, and live as long as the run.
    Without this each full collection scans all of them, which stops training for a noticeable part
    of a step. What is frozen already stays so: a forked rank has frozen its parent's objects.
    """
    if gc.get_freeze_count():
        yield
        return
    froze = False

    def collected(phase: str, info: dict[str, Any]) -> None:
        nonlocal froze
        if phase == "stop" and info["generation"] == _OLDEST and not froze:
            froze = True
            gc.freeze()

    gc.callbacks.append(collected)
    try:
        yield
    finally:
        gc.callbacks.remove(collected)
        if froze:
            gc.unfreeze()

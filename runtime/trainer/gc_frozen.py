"""Short pauses for Python's garbage collector while a run trains."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["freeze", "survivors_frozen"]

_OLDEST = 2
_frozen: list[Callable[[], None]] = []
"""The functions that undo `freeze`. To ask Python takes long if many objects are frozen."""


def freeze() -> Callable[[], None]:
    """Freeze all objects, so that those which come later are collected in no time, until the
    returned function is called. What was frozen before stays so."""
    is_first = not gc.get_freeze_count()
    gc.collect()
    gc.freeze()

    def unfreeze() -> None:
        _frozen.remove(unfreeze)
        if is_first:
            gc.unfreeze()

    _frozen.append(unfreeze)
    return unfreeze


@contextmanager
def survivors_frozen() -> Iterator[None]:
    """Freeze, until the block ends, what survives the first full collection in it.

    Modules, model and data make up nearly all objects of a process, and live as long as the run.
    Without this each full collection scans all of them, which stops training for a noticeable part
    of a step. What is frozen already stays so: a forked rank has frozen its parent's objects.
    """
    if _frozen:
        yield
        return
    was_collected = froze = False

    def collected(phase: str, info: dict[str, Any]) -> None:
        nonlocal was_collected, froze
        if phase == "stop" and info["generation"] == _OLDEST and not was_collected:
            was_collected = True
            froze = not gc.get_freeze_count()  # it takes long, and a short run needs it never
            if froze:
                gc.freeze()

    gc.callbacks.append(collected)
    try:
        yield
    finally:
        gc.callbacks.remove(collected)
        if froze:
            gc.unfreeze()

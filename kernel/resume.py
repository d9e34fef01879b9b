"""Resuming: from which checkpoint, and what has changed since."""

from __future__ import annotations

import os

from .agreement import ask_first, plain
from .checkpoint import (
    CHECKPOINTS,
    MANIFEST,
    Manifest,
    Place,
    Url,
    checkpoints_of,
    is_checkpoint,
    newest,
    place,
)
from .contract import Session
from .errors import CheckpointNotFound
from .settings import Settings

__all__ = ["differences", "find_checkpoint"]


def differences(
    manifest: Manifest, settings: Settings, driver: str, world_size: int
) -> tuple[str, ...]:
    """What is not as in the run that wrote the checkpoint; all of it is allowed."""
    then = {"backend": manifest.driver, "world size": manifest.world_size, **manifest.settings}
    now = {"backend": driver, "world size": world_size, **plain(settings)}
    return tuple(
        f"{key} was {then[key]}, is {now[key]}"
        for key in now
        if key in then and then[key] != now[key]
    )


def find_checkpoint(
    session: Session, source: str | os.PathLike[str] | Url, out: Place | None
) -> Place | None:
    """The checkpoint to resume from, as rank 0 sees it; None when `auto` finds none.

    `source`: `auto` (the newest complete one in `out`), a checkpoint, or a folder of them. Raises
    `CheckpointNotFound` on all ranks, and `StorageFailed`: what cannot be looked into may hold one.
    """
    automatic = source == "auto"
    if automatic and out is None:
        raise CheckpointNotFound("resume is 'auto' and there is no run folder to look in")
    folder = out / CHECKPOINTS if automatic and out else place(source)

    def look() -> str:
        found = folder if is_checkpoint(folder) else newest(checkpoints_of(folder))
        return "" if found is None else str(found)

    found = ask_first(session, look)
    if not found and not automatic:
        raise CheckpointNotFound(
            f"no complete checkpoint in {folder}; give a checkpoint folder (it holds {MANIFEST}) "
            "or a run folder"
        )
    return place(found) if found else None

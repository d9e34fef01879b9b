"""Resuming: from which checkpoint, and what has changed since."""

from __future__ import annotations

from pathlib import Path

from .agreement import plain
from .checkpoint import (
    CHECKPOINTS,
    MANIFEST,
    Manifest,
    checkpoints_of,
    is_checkpoint,
    newest,
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


def find_checkpoint(session: Session, source: str | Path, out: Path | None) -> Path | None:
    """The checkpoint to resume from, as rank 0 sees it; None when `auto` finds none.

    `source`: `auto` (the newest complete one in `out`), a checkpoint, or a folder of them. Raises
    `CheckpointNotFound` on all ranks.
    """
    automatic = source == "auto"
    if automatic and out is None:
        raise CheckpointNotFound("resume is 'auto' and there is no run folder to look in")
    folder = out / CHECKPOINTS if automatic and out else Path(source)
    found = None
    if session.world.rank == 0:
        found = folder if is_checkpoint(folder) else newest(checkpoints_of(folder))
    found = session.exchange(None if found is None else str(found))[0]
    if found is None and not automatic:
        raise CheckpointNotFound(
            f"no complete checkpoint in {folder}; give a checkpoint folder (it holds {MANIFEST}) "
            "or a run folder"
        )
    return None if found is None else Path(found)

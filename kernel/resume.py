"""Starting together: the same configuration on all ranks, and the same checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint import Manifest, newest
from .contract import Session
from .errors import CheckpointNotFound, CollectiveFailed
from .settings import Settings, flatten

__all__ = ["CHECKPOINTS", "agree", "differences", "find_checkpoint", "plain"]

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run folder."""


def plain(settings: Settings) -> dict[str, Any]:
    """Settings by dotted key, as JSON holds them."""
    flat = flatten(settings)
    return {key: list(v) if isinstance(v, tuple) else v for key, v in flat.items()}


def agree(session: Session, configuration: Mapping[str, Any]) -> None:
    """Raises `CollectiveFailed`, with the difference, unless all ranks pass equal values."""
    mine = {key: str(value) for key, value in configuration.items()}
    for rank, theirs in enumerate(session.exchange(mine)):
        differing = [key for key in mine if mine[key] != theirs.get(key)]
        if differing:
            shown = ", ".join(f"{k}: {mine[k]} here, {theirs.get(k)} there" for k in differing)
            raise CollectiveFailed(
                f"rank {session.world.rank} and rank {rank} were started with different "
                f"configurations: {shown}. Start every rank with the same command"
            )


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
    found = session.exchange(_newest(folder) if session.world.rank == 0 else None)[0]
    if found is None and not automatic:
        raise CheckpointNotFound(
            f"no complete checkpoint in {folder}; give a checkpoint folder (it holds "
            "manifest.json) or a run folder"
        )
    return None if found is None else Path(found)


def _newest(folder: Path) -> str | None:
    if (folder / "manifest.json").is_file():
        return str(folder)
    nested = folder / CHECKPOINTS
    path = newest(nested if nested.is_dir() else folder)
    return None if path is None else str(path)

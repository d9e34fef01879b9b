"""Resuming: selects the checkpoint, and describes what has changed since."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from ..checkpoint import (
    CHECKPOINTS,
    MANIFEST,
    CheckpointReader,
    Manifest,
    checkpoints_of,
    is_checkpoint,
    list_checkpoints,
    named,
    storage_of,
)
from ..checkpoint.catalog import set_aside
from ..checkpoint.storage.local import forget_cached
from ..kernel.contract import Session
from ..kernel.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, StorageFailed
from ..kernel.paths import Place, Url, place
from .settings import Settings
from .start_checks import json_types, on_rank_0

__all__ = ["damage", "differences", "find_checkpoint"]

_Problems = list[tuple[str, str]]
"""Checkpoint folders, each with the reason why it cannot be resumed from."""


def differences(
    manifest: Manifest, settings: Settings, driver: str, world_size: int
) -> tuple[str, ...]:
    """Describe the differences from the run that wrote the checkpoint; all of them are allowed."""
    then = {"backend": manifest.driver, "world size": manifest.world_size, **manifest.settings}
    now = {"backend": driver, "world size": world_size, **json_types(settings)}
    return tuple(
        f"{key} was {then[key]}, is {now[key]}"
        for key in now
        if key in then and then[key] != now[key]
    )


def damage(session: Session, folder: Place) -> list[str]:
    """Return the damaged files of a checkpoint. All ranks check together: each rank reads a share
    of the files, those that it is likely to read again when it resumes. Raises `StorageFailed` on
    all ranks for a file that cannot be read: the file may be sound."""
    world = session.world
    mine: list[str] = []
    failed = ""
    try:
        mine = CheckpointReader(folder).damaged_files(world.rank, world.size)
    except CheckpointError as error:
        mine = [str(error)]
    except StorageFailed as error:
        failed = f"rank {world.rank}: {error}"
    results = session.exchange([mine, failed])
    if failures := [failed for _, failed in results if failed]:
        raise StorageFailed("; ".join(failures))
    return [problem for problems, _ in results for problem in problems]


def find_checkpoint(
    session: Session,
    source: str | os.PathLike[str] | Url,
    out: Place | None,
    *,
    verify: bool = True,
    report: Callable[[str], None] = lambda text: None,
) -> Place | None:
    """Return the checkpoint to resume from; None if `auto` finds none. Rank 0 lists the
    checkpoints.

    `source`: `auto` (the newest complete one in `out`), a checkpoint, or a folder of them. Damaged
    checkpoints are skipped: `report` is called with the reason on all ranks, and those in `out` are
    renamed, so that they are not replaced. `verify`: compare checksums, too. Raises
    `CheckpointNotFound` or `CheckpointDamaged` on all ranks, and `StorageFailed` for a place that
    cannot be read, which may hold a checkpoint.
    """
    automatic = source == "auto"
    if automatic and out is None:
        raise CheckpointNotFound("resume is 'auto' and there is no run folder to look in")
    folder = out / CHECKPOINTS if automatic and out else place(source)
    names, torn, damaged = on_rank_0(session, lambda: _look(folder))
    found = None
    for name in names:
        problems = damage(session, place(name)) if verify else []
        if not problems:
            found = place(name)
            break
        damaged.append((name, problems[0]))
    if found is None and damaged:
        raise CheckpointDamaged(
            f"no checkpoint in {folder} can be resumed from, and all are kept: "
            + "; ".join(reason for _, reason in damaged)
            + ". Resume from a checkpoint of another run, or start over in another folder"
        )
    if found is None and not automatic:
        raise CheckpointNotFound(
            f"no complete checkpoint in {folder}; give a checkpoint folder (it holds {MANIFEST}) "
            "or a run folder"
        )
    for name, reason in (*torn, *damaged):
        report(f"{place(name).name} is left out, and kept: {reason}")
    if automatic and session.world.rank == 0:
        with contextlib.suppress(OSError):  # nothing can be replaced there either
            for name, _ in damaged:
                set_aside(place(name))
    return found


def _look(folder: Place) -> tuple[list[str], _Problems, _Problems]:
    """List complete checkpoints, newest first; checkpoints that were never completed; and
    checkpoints that are no longer complete."""
    folder = named(folder)
    if is_checkpoint(folder):
        return [str(folder)], [], []
    listing = list_checkpoints(checkpoints_of(folder))
    suspects = [each.folder for each in listing.rejected if is_checkpoint(each.folder)]
    if suspects:  # read once more from the disk: only a file that is wrong twice is damaged
        for suspect in suspects:
            if isinstance(suspect, Path):
                forget_cached(suspect / MANIFEST)
        listing = list_checkpoints(checkpoints_of(folder))
    torn: _Problems = []
    damaged: _Problems = []
    for rejected in listing.rejected:
        path = rejected.folder
        foreign = storage_of(path).is_link(path) or path.name.startswith(".")
        once_complete = is_checkpoint(path) and not foreign
        (damaged if once_complete else torn).append((str(path), rejected.reason))
    return [str(found.folder) for found in reversed(listing.complete)], torn, damaged

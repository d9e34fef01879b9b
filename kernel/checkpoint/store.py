"""Saves checkpoints so that every rank's share is on disk, or nothing is.

A save is four acts, agreed by all ranks one after the other: collect the pieces, prepare the
folder, write the files, commit. An asynchronous save is the same acts at other times.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from ..contract import Engine, Piece, Session
from ..errors import SaveFailed
from . import catalog, files
from .manifest import FileEntry, Manifest, write_manifest
from .reader import CheckpointReader
from .writer import RNG, collect, write_pieces

__all__ = ["CheckpointStore", "load_rng", "save_folder"]

_LOG = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run, in one folder that all ranks see.

    One run writes to a folder at a time. See `Retention` for what is kept.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        keep_last: int | None = None,
        keep_best: int = 1,
        best_metric: str | None = None,
        best_mode: Literal["min", "max"] = "min",
        keep_every: int | None = None,
        digits: int = 6,
    ) -> None:
        self.root, self.digits = Path(root), digits
        self.retention = catalog.Retention(keep_last, keep_best, best_metric, best_mode, keep_every)

    def save(
        self,
        step: int,
        engine: Engine,
        session: Session,
        state: Mapping[str, Any],
        *,
        settings: Mapping[str, Any] | None = None,
        driver: str = "",
        beside: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write the checkpoint of `step`; all ranks call it, and return once it is committed.

        `state` and `settings` go into the manifest (JSON types; rank 0's are used). `beside` is
        called on all ranks with the folder that is being written, to put other files there: they
        appear with the checkpoint, and resuming does not read them. Raises
        `SaveFailed` on all ranks when any of them fails, with that rank, the file and the reason;
        then nothing is left of it and the checkpoints before it are untouched.
        """
        folder = catalog.checkpoint_path(self.root, step, self.digits)
        temporary = catalog.hidden_path(folder, "writing")
        world = session.world
        pieces: list[Piece] = []

        def gather() -> int:
            pieces.extend(collect(engine, session))
            return sum(piece.tensor.nbytes for piece in pieces)

        def write() -> list[tuple[str, int, int]]:
            written = write_pieces(temporary, pieces, world.rank, world.size)
            return [(file.name, file.num_bytes, file.crc32) for file in written]

        def commit() -> None:
            entries = tuple(FileEntry(*file) for rank_files in written for file in rank_files)
            if beside is not None:
                files.sync_tree(temporary)
            write_manifest(
                temporary,
                Manifest(
                    step,
                    entries,
                    dict(state),
                    dict(settings or {}),
                    driver,
                    world.size,
                    engine.tied,
                ),
            )
            catalog.publish(folder)

        try:
            sizes = _together(session, folder, gather)
            _on_first(session, folder, lambda: self._prepare(temporary, sum(sizes)))
            written = _together(session, folder, write)
            if beside is not None:  # once all have written: it may call what ranks do together
                _together(session, folder, lambda: beside(temporary))
            _on_first(session, folder, commit)
        except SaveFailed:
            if world.rank == 0:
                with contextlib.suppress(OSError):
                    catalog.sweep(self.root)
            raise
        if world.rank == 0:
            self._retire()
        return folder

    def best(self) -> Path | None:
        """The complete checkpoint with the best metric; None when none has it."""
        ranked = self.retention.best(catalog.list_checkpoints(self.root).complete)
        return ranked[0].folder if ranked else None

    def _prepare(self, temporary: Path, num_bytes: int) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        catalog.sweep(self.root)
        free = shutil.disk_usage(self.root).free
        if num_bytes > free:
            raise OSError(
                errno.ENOSPC, f"{num_bytes} bytes to write and {free} free", str(self.root)
            )
        os.mkdir(temporary)

    def _retire(self) -> None:
        # The save has succeeded: what cannot be deleted is a nuisance, and no reason to stop.
        try:
            catalog.sweep(self.root)
            for found in self.retention.surplus(catalog.list_checkpoints(self.root).complete):
                catalog.retire(found.folder)
        except OSError as error:
            _LOG.warning("an old checkpoint could not be removed: %s", error)


def save_folder(folder: Path, session: Session, fill: Callable[[Path], None]) -> None:
    """Write a folder that is no checkpoint by itself, as safely as one; called by all ranks.

    `fill` is called on all of them with a folder that takes its name when all are done. Raises
    `SaveFailed` on all ranks when any of them fails.
    """
    temporary = catalog.hidden_path(folder, "writing")

    def prepare() -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        catalog.sweep(folder.parent)
        os.mkdir(temporary)

    def commit() -> None:
        files.sync_tree(temporary)
        catalog.publish(folder)
        catalog.sweep(folder.parent)

    _on_first(session, folder, prepare)
    try:
        _together(session, folder, lambda: fill(temporary))
        _on_first(session, folder, commit)
    except SaveFailed:
        if session.world.rank == 0:
            with contextlib.suppress(OSError):
                catalog.sweep(folder.parent)
        raise


def load_rng(reader: CheckpointReader, session: Session) -> bool:
    """Give this rank the random state that it saved; generators that it did not save stay as they
    are. False, and nothing is changed, when the checkpoint is of another world size or of a driver
    with other generators.
    """
    rank = f"{RNG}/{session.world.rank}/"
    names = [name for name in reader.names("state") if name.startswith(rank)]
    stored = {name.removeprefix(rank): reader.read("state", name) for name in names}
    current = {name: (t.dtype, t.shape) for name, t in session.rng_state().items()}
    shared = stored.keys() & current.keys()
    fits = all(current[name] == (stored[name].dtype, stored[name].shape) for name in shared)
    if not shared or not fits or reader.manifest.world_size != session.world.size:
        return False
    session.set_rng_state(stored)
    return True


def _on_first(session: Session, folder: Path, act: Callable[[], None]) -> None:
    _together(session, folder, act if session.world.rank == 0 else lambda: None)


def _together(session: Session, folder: Path, act: Callable[[], Any]) -> list[Any]:
    """Everyone's result (JSON types), once all ranks have acted; `SaveFailed` on all if one failed.

    Every `Exception` is told to the others: a rank that left without a word would stop them all.
    """
    cause: Exception | None = None
    answer: dict[str, Any] = {"rank": session.world.rank}
    try:
        answer["result"] = act()
    except Exception as error:
        cause, answer["error"] = error, f"{type(error).__name__}: {error}"
    answers = session.exchange(answer)
    failures = [f"rank {a['rank']}: {a['error']}" for a in answers if "error" in a]
    if failures:
        raise SaveFailed(
            f"{folder} was not saved, the checkpoints before it are untouched; "
            + "; ".join(failures[:3])
            + (f"; and {len(failures) - 3} more ranks" if len(failures) > 3 else "")
        ) from cause
    return [a["result"] for a in answers]

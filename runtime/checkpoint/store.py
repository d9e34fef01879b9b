"""Saves checkpoints atomically: every rank's share is on disk, or nothing is.

A save is four steps, agreed by all ranks one after the other: collect the pieces, prepare the
folder, write the files, commit. A save in the background has the same steps at other times: the
first copies, a thread writes, and the commit waits until all ranks have written.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import functools
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from ..kernel.contract import Engine, Session
from ..kernel.errors import SaveFailed, SettingError, UsageError
from ..kernel.paths import Place, Url, place
from ..kernel.shards import Piece
from . import catalog
from .background import remove_in_background, removed, write_in_background
from .buffers import HostCopies
from .frozen import Checksums, FrozenFile
from .index.tree import join_level, num_levels
from .manifest import FileEntry, Manifest, read_manifest, replace_manifest, write_manifest
from .random_state import FEEDERS
from .storage import local
from .storage.protocol import storage_of
from .writer import collect, write_pieces

__all__ = ["BackgroundSave", "CheckpointStore", "save_folder"]

_LOG = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run, in a folder or at a URL that all ranks can access.

    One run at a time writes to a folder. `Retention` decides which checkpoints are kept.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Url,
        *,
        keep_last: int | None = None,
        keep_best: int = 1,
        best_metric: str | None = None,
        best_mode: Literal["min", "max"] = "min",
        keep_every: int | None = None,
        digits: int = 6,
        guard: Callable[[], None] | None = None,
    ) -> None:
        """`guard`: called on the first rank before it changes anything; raises to end a save."""
        self.root, self.digits = place(root), digits
        self._guard = guard or (lambda: None)
        self.retention = catalog.Retention(keep_last, keep_best, best_metric, best_mode, keep_every)
        self._copies, self._sums = HostCopies(), Checksums()

    def save(
        self,
        step: int,
        engine: Engine,
        session: Session,
        state: Mapping[str, Any],
        *,
        settings: Mapping[str, Any] | None = None,
        driver: str = "",
        frozen: Collection[str] = (),
        beside: Callable[[Path], None] | None = None,
    ) -> Place:
        """Write the checkpoint of `step`. All ranks call it, and it returns once the checkpoint is
        committed. Older checkpoints that are not kept are then no longer listed, and deleted in the
        background.

        `state` and `settings` go into the manifest (JSON types; rank 0's are used). `frozen`: FQNs
        of weights that do not learn, the same on all ranks. They go into files of their own; one
        that an earlier checkpoint here holds already is linked to (see `frozen`). `beside` is
        called on all ranks with the folder that is being written, to put other files there: they
        appear with the checkpoint, and resuming does not read them (paths only, no URLs). Raises
        `SaveFailed` on all ranks when any of them fails, with that rank, the file and the reason;
        then nothing is left of it and the checkpoints before it are untouched.
        """
        manifest = _manifest(step, engine, session, state, settings, driver)
        with self._swept_on_failure(session):
            saving = self._begin(manifest, session, frozen, lambda: collect(engine, session))
            written = _together(session, saving.folder, saving.write)
            if beside is not None:  # once all have written: `beside` may call collectives
                _together(session, saving.folder, lambda: beside(_local(saving.place)))
            saving.commit(written, tidy=beside is None)
        if session.world.rank == 0 and (retired := self._retire(saving.folder)):
            remove_in_background(lambda: _remove(retired))
        return saving.folder

    def best(self) -> tuple[Place, float] | None:
        """Return the best complete checkpoint by the metric, with the metric; None if no checkpoint
        has it."""
        metric = self.retention.best_metric
        found = self.retention.best(catalog.list_checkpoints(self.root).complete)
        if not found or metric is None:
            return None
        return found[0].folder, float(found[0].manifest.state["metrics"][metric])

    def get_ready(self, engine: Engine, session: Session) -> None:
        """Begin to allocate the host memory for saves in the background. All ranks call it after
        the first step, when optimizers have their state. Otherwise the first save allocates the
        memory while training waits."""
        self._copies.get_ready([piece.tensor.nbytes for piece in collect(engine, session)])

    def save_in_background(
        self,
        step: int,
        engine: Engine,
        session: Session,
        state: Mapping[str, Any],
        *,
        settings: Mapping[str, Any] | None = None,
        driver: str = "",
        frozen: Collection[str] = (),
    ) -> BackgroundSave:
        """Begin a save in the background: this rank's share is copied into host memory, which
        the next save uses again, and a thread writes it.

        Only one save may be in progress: finish it before the next. Raises `SaveFailed` as `save`
        does.
        """
        state = copy.deepcopy(dict(state))  # training continues, and may change its content
        manifest = _manifest(step, engine, session, state, settings, driver)
        with self._swept_on_failure(session):
            saving = self._begin(
                manifest, session, frozen, lambda: list(self._copies.of(collect(engine, session)))
            )
        writing = write_in_background(saving.write)
        return BackgroundSave(saving, self, writing, self._copies.num_bytes)

    def finish(self, begun: BackgroundSave) -> Place:
        """Commit a save that `save_in_background` began. All ranks call it, once all have written
        (`BackgroundSave.written`) or if they must wait for the save. Raises `SaveFailed`."""
        saving = begun.saving
        with self._swept_on_failure(saving.session):
            saving.commit(_together(saving.session, saving.folder, begun.writing.result))
        if saving.session.world.rank == 0:
            remove_in_background(lambda: _remove(self._retire(saving.folder)))
        return saving.folder

    def amend(self, step: int, state: Mapping[str, Any]) -> None:
        """Replace entries of the state of this step's checkpoint, if there is one: metrics that
        were measured after it was saved, for example. Its tensors stay. Only rank 0 calls it.
        Raises `OSError` and `DrivetrainError`."""
        folder = catalog.checkpoint_path(self.root, step, self.digits)
        if not catalog.is_checkpoint(folder):
            return
        manifest = read_manifest(folder)
        amended = {**manifest.state, **state}
        if amended == manifest.state:
            return
        self._guard()
        replace_manifest(folder, dataclasses.replace(manifest, state=amended))
        remove_in_background(lambda: _remove(self._retire(folder)))

    def wait(self) -> None:
        """Wait until nothing is written or removed in the background. Call `finish` for a save
        first."""
        removed()

    def tidy(self) -> None:
        """Remove the remains of a failed save, if possible. Any rank may call it while no save is
        in progress."""
        catalog.tidy(self.root)

    def _begin(
        self,
        manifest: Manifest,
        session: Session,
        frozen: Collection[str],
        gather: Callable[[], list[Piece]],
    ) -> _Saving:
        folder = catalog.checkpoint_path(self.root, manifest.step, self.digits)
        apart = FrozenFile(self.root, frozen, self._sums)
        saving = _Saving(folder, manifest, session, self._guard, apart)

        def num_bytes() -> list[int]:
            saving.pieces = gather()
            frozen_bytes = sum(p.tensor.nbytes for p in saving.pieces if apart.holds(p))
            return [sum(p.tensor.nbytes for p in saving.pieces) - frozen_bytes, frozen_bytes]

        sizes = _together(session, folder, num_bytes)
        found = _on_first(session, folder, lambda: self._prepare(saving, sizes))
        apart.before, apart.earlier = found
        return saving

    @contextlib.contextmanager
    def _swept_on_failure(self, session: Session) -> Iterator[None]:
        try:
            yield
        except SaveFailed:
            if session.world.rank == 0:
                with contextlib.suppress(OSError, UsageError):
                    removed()
                    self._guard()
                    catalog.sweep(self.root)
            raise

    def _prepare(self, saving: _Saving, sizes: list[list[int]]) -> tuple[list[str], list[str]]:
        """Prepare the folder, and return the result of `FrozenFile.find_earlier`. `sizes`: for
        each rank, the bytes of all but frozen weights, and the bytes of frozen weights."""
        removed()
        self._guard()
        storage = storage_of(self.root)
        storage.make_folder(self.root)
        catalog.sweep(self.root)
        before, earlier = saving.frozen.find_earlier(self.retention, saving.manifest)
        learning, frozen = map(sum, zip(*sizes, strict=True))
        num_bytes = learning if earlier else learning + frozen  # frozen files may be linked
        free = storage.free_bytes(self.root)
        if free is not None and num_bytes > free:
            raise OSError(
                errno.ENOSPC, f"{num_bytes} bytes to write and {free} free", str(self.root)
            )
        catalog.begin(saving.folder)
        return before, earlier

    def _retire(self, folder: Place) -> list[Place]:
        """Return the checkpoints that need not stay now that `folder` exists, renamed for
        removal."""
        try:
            replaced = catalog.hidden_path(folder, "replaced")
            retired = [replaced] if storage_of(folder).exists(replaced) else []
            complete = catalog.list_checkpoints(self.root).complete
            return retired + [catalog.unlist(f.folder) for f in self.retention.surplus(complete)]
        except OSError as error:
            _cannot_remove(error)
            return []


class _Saving:
    """The steps of one save on one rank; the store exchanges results between ranks."""

    def __init__(
        self,
        folder: Place,
        manifest: Manifest,
        session: Session,
        guard: Callable[[], None],
        frozen: FrozenFile,
    ) -> None:
        self.folder, self.manifest, self.session = folder, manifest, session
        self.guard, self.frozen = guard, frozen
        self.place = catalog.writing_place(folder)
        self.pieces: list[Piece] = []

    def write(self) -> list[tuple[str, int, int]]:
        """Write this rank's files; return names, sizes and checksums. Communicates with no other
        rank."""
        world = self.session.world
        pieces, self.pieces = self.pieces, []
        written = write_pieces(self.place, pieces, world.rank, world.size, self.frozen)
        return [(file.name, file.num_bytes, file.crc32) for file in written]

    def commit(self, written: list[list[tuple[str, int, int]]], tidy: bool = True) -> None:
        """Commit the checkpoint of its step. `tidy`: the folder holds nothing but these files."""
        entries = tuple(FileEntry(*file) for files_of_rank in written for file in files_of_rank)
        entries += self._indexed(entries)

        def act() -> None:
            self.guard()
            if not tidy:
                local.sync_tree(_local(self.place))
            write_manifest(self.place, dataclasses.replace(self.manifest, files=entries))
            catalog.publish(self.folder)

        _on_first(self.session, self.folder, act)

    def _indexed(self, entries: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        """Write the index of these files, if there are many: ranks join the indexes that other
        ranks have joined."""
        world, below = self.session.world, entries
        for level in range(1, num_levels(world.size) + 1):
            act = functools.partial(join_level, self.place, below, level, world.rank, world.size)
            made = _together(self.session, self.folder, act)
            below = tuple(FileEntry(*each) for each in made if each is not None)
        return () if below is entries else below


@dataclasses.dataclass(frozen=True)
class BackgroundSave:
    """A save that a thread of this rank is writing."""

    saving: _Saving
    store: CheckpointStore
    writing: Future[Any]
    buffer_bytes: int
    """Host memory that holds the copy on this rank."""

    @property
    def written(self) -> bool:
        """True once this rank has written its share, or failed to."""
        return self.writing.done()

    def finish(self) -> Place:
        """See `CheckpointStore.finish`."""
        return self.store.finish(self)


def _manifest(
    step: int,
    engine: Engine,
    session: Session,
    state: Mapping[str, Any],
    settings: Mapping[str, Any] | None,
    driver: str,
) -> Manifest:
    """Return the manifest without the files, which are not written yet."""
    world, state = session.world, dict(state)
    if world.num_feeders != world.size:
        state[FEEDERS] = world.num_feeders
    return Manifest(step, (), state, dict(settings or {}), driver, world.size, engine.tied)


def _remove(retired: list[Place]) -> None:
    try:
        for folder in retired:
            storage_of(folder).remove(folder)
    except OSError as error:
        _cannot_remove(error)


def _cannot_remove(error: OSError) -> None:
    # The save has succeeded: an old checkpoint that cannot be deleted does not end the run.
    _LOG.warning("an old checkpoint could not be removed: %s", error)


def save_folder(folder: Path, session: Session, fill: Callable[[Path], None]) -> None:
    """Write a folder that is no checkpoint by itself, as safely as one; called by all ranks.

    `fill` is called on all of them with a folder that takes its name when all are done. Raises
    `SaveFailed` on all ranks when any of them fails.
    """
    temporary = _local(catalog.writing_place(folder))

    def prepare() -> None:
        removed()
        folder.parent.mkdir(parents=True, exist_ok=True)
        catalog.sweep(folder.parent)
        catalog.begin(folder)

    def commit() -> None:
        local.sync_tree(temporary)
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


def _local(folder: Place) -> Path:
    if isinstance(folder, Url):
        raise SettingError(f"{folder}: other files than tensors can be saved to a folder only")
    return folder


def _on_first(session: Session, folder: Place, act: Callable[[], Any]) -> Any:
    """Call `act` on rank 0 and return its result (JSON types) on all ranks."""
    return _together(session, folder, act if session.world.rank == 0 else lambda: None)[0]


def _together(session: Session, folder: Place, act: Callable[[], Any]) -> list[Any]:
    """Return all ranks' results (JSON types), once all have acted. Raises `SaveFailed` on all ranks
    if one failed.

    Every `Exception` is sent to the other ranks: a rank that left silently would block them.
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

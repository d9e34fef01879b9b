"""Frozen weights: kept in separate files, which the checkpoints of a run share.

If an earlier checkpoint has the same file, a save creates a hard link to it instead of writing it.
The bytes are on the disk once, each folder is complete, and deleting one folder leaves the others
intact. A checkpoint shares no file with the checkpoint kept before it, which remains a fallback if
a block of the disk is bad. So the first two saves write files, and later saves link to these two
files in turn.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ..kernel.errors import CheckpointDamaged
from ..kernel.paths import Place
from ..kernel.shards import Piece
from .catalog import Found, Retention, list_checkpoints
from .format import safetensors
from .format.safetensors import Source
from .manifest import FileEntry, Manifest
from .storage.local import LOCAL

__all__ = ["Checksums", "FrozenFile", "shared_bytes"]

_LOG = logging.getLogger(__name__)
_FEW = 3
"""Number of checkpoints that are searched. Since two files take turns, the newest two checkpoints
hold both."""


def shared_bytes(folder: Place, files: Iterable[FileEntry]) -> int:
    """Return the total size of a checkpoint's files that have further hard links."""
    if not isinstance(folder, Path):
        return 0
    return sum(file.num_bytes for file in files if os.lstat(folder / file.name).st_nlink > 1)


class _Inode(NamedTuple):
    """The identity of a file's content; it changes when the file is written to."""

    device: int
    number: int
    size: int
    changed: int


class Checksums:
    """The checksums of the files that this process wrote or read."""

    def __init__(self) -> None:
        self._known: dict[_Inode, int | None] = {}
        self._warned = False

    def of(self, path: Path, inode: _Inode) -> int | None:
        """Return the checksum of an existing file, which is read at most once; None if it is
        damaged.
        """
        if inode not in self._known:
            self._known[inode] = _read(path)
        return self._known[inode]

    def note(self, path: Path, crc: int) -> None:
        """Record the checksum of a file that was just written."""
        if inode := _inode(path):
            self._known[inode] = crc

    def warn_once(self, why: object) -> None:
        """Warn once that files are not shared."""
        if not self._warned:
            self._warned = True
            _LOG.warning("frozen weights are written again, and not linked to: %s", why)


class FrozenFile:
    """One rank's file of frozen weights, in one save."""

    def __init__(self, root: Place, names: Collection[str], sums: Checksums) -> None:
        """`root`: the folder of checkpoints. `names`: FQNs of weights that are not expected to
        change. In an object store, which has no links, they are written with the other weights."""
        self.root, self.names, self.sums = root, names, sums
        self.before: list[str] = []
        """The kept checkpoint, if any, that serves as the fallback if this one is damaged."""
        self.earlier: list[str] = []
        """Other checkpoints whose files this one may share, the best first."""

    def holds(self, piece: Piece) -> bool:
        """True for a piece that belongs into this file."""
        of_these = piece.kind == "weights" and piece.name in self.names
        return of_these and isinstance(self.root, Path)

    def find_earlier(self, retention: Retention, new: Manifest) -> tuple[list[str], list[str]]:
        """Return `before` and `earlier`. One rank calls this, and sends the result to all ranks.
        `new`: the manifest of the checkpoint to save."""
        if not self.names:
            return [], []
        if not isinstance(self.root, Path):
            self.sums.warn_once(f"{self.root} is in an object store, which has no links")
            return [], []
        found = [each for each in list_checkpoints(self.root).complete if each.step != new.step]
        gone = retention.surplus([*found, Found(new.step, self.root, new)])
        before = [each.folder.name for each in found if each not in gone][-1:]
        names = [each.folder.name for each in found[: -_FEW - 1 : -1]]
        return before, [name for name in names if name not in before]

    def write(
        self, path: Place, sources: Mapping[str, Source], metadata: Mapping[str, str]
    ) -> tuple[int, int]:
        """Write the file as `safetensors.write` does, or link to a file with the same content."""
        assert isinstance(path, Path), "elsewhere it holds nothing"
        linked = self._link(path, sources, metadata)
        if linked is not None:
            return linked
        size, crc = safetensors.write(path, sources, metadata)
        self.sums.note(path, crc)
        return size, crc

    def _link(
        self, path: Path, sources: Mapping[str, Source], metadata: Mapping[str, str]
    ) -> tuple[int, int] | None:
        root = path.parent.parent
        taken = [_inode(root / name / path.name) for name in self.before]
        places = [root / name / path.name for name in self.earlier]
        found = {inode: old for old in places if (inode := _inode(old)) and inode not in taken}
        if not found:
            return None
        size, crc = safetensors.checksum(sources, metadata)
        for inode, old in found.items():
            if inode.size == size and self.sums.of(old, inode) == crc:
                try:
                    LOCAL.link(old, path)
                    return size, crc
                except OSError as error:
                    self.sums.warn_once(error)
        return None


def _inode(path: Path) -> _Inode | None:
    """Return the identity of a regular file; None for anything else."""
    try:
        seen = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISREG(seen.st_mode):
        return None
    return _Inode(seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns)


def _read(path: Path) -> int | None:
    try:
        return safetensors.TensorFile(path).crc32()
    except CheckpointDamaged:
        return None

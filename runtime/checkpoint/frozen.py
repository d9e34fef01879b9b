"""Weights that do not learn: in files of their own, which the checkpoints of a run share.

Where an earlier checkpoint's file is the same, a save gives it a second name (a hard link) instead
of writing it: its bytes lie on the disk once, each folder is whole, and deleting one leaves the
others. A checkpoint shares nothing with the one before it that stays: where a block of the disk is
bad, that one can be gone back to. So two saves write, and then two files take turns.
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

__all__ = ["FrozenFile", "Sums", "shared_bytes"]

_LOG = logging.getLogger(__name__)
_FEW = 3
"""Checkpoints that are looked at. With two files that take turns, the newest two hold both."""


def shared_bytes(folder: Place, files: Iterable[FileEntry]) -> int:
    """The size of those of a checkpoint's files that have other names, too."""
    if not isinstance(folder, Path):
        return 0
    return sum(file.num_bytes for file in files if os.lstat(folder / file.name).st_nlink > 1)


class _Inode(NamedTuple):
    """Another one where a file was written to."""

    device: int
    number: int
    size: int
    changed: int


class Sums:
    """The checksums of the files that this process wrote or read."""

    def __init__(self) -> None:
        self._known: dict[_Inode, int | None] = {}
        self._told = False

    def of(self, path: Path, inode: _Inode) -> int | None:
        """Of a file that lies there; it is read unless that was done. None for a damaged one."""
        if inode not in self._known:
            self._known[inode] = _read(path)
        return self._known[inode]

    def note(self, path: Path, crc: int) -> None:
        """Of a file that was just written."""
        if inode := _inode(path):
            self._known[inode] = crc

    def tell(self, why: object) -> None:
        """That files are not shared: once."""
        if not self._told:
            self._told = True
            _LOG.warning("frozen weights are written again, and not linked to: %s", why)


class FrozenFile:
    """One rank's file of frozen weights, in one save."""

    def __init__(self, root: Place, names: Collection[str], sums: Sums) -> None:
        """`root`: where checkpoints lie. `names`: FQNs of weights that are not expected to change;
        in an object store, which has no links, they are written with the others."""
        self.root, self.names, self.sums = root, names, sums
        self.before: list[str] = []
        """The checkpoint, if one stays, that is gone back to where this one is damaged."""
        self.earlier: list[str] = []
        """Others, whose files this one may share, the best first."""

    def holds(self, piece: Piece) -> bool:
        """True for a piece that lies in this file."""
        of_these = piece.kind == "weights" and piece.name in self.names
        return of_these and isinstance(self.root, Path)

    def look(self, retention: Retention, new: Manifest) -> tuple[list[str], list[str]]:
        """`before` and `earlier`, which one rank finds and all are told. `new`: what is saved."""
        if not self.names:
            return [], []
        if not isinstance(self.root, Path):
            self.sums.tell(f"{self.root} is in an object store, which has no links")
            return [], []
        found = [each for each in list_checkpoints(self.root).complete if each.step != new.step]
        gone = retention.surplus([*found, Found(new.step, self.root, new)])
        before = [each.folder.name for each in found if each not in gone][-1:]
        names = [each.folder.name for each in found[: -_FEW - 1 : -1]]
        return before, [name for name in names if name not in before]

    def write(
        self, path: Place, sources: Mapping[str, Source], metadata: Mapping[str, str]
    ) -> tuple[int, int]:
        """As `safetensors.write`, or by linking to a file that holds the same."""
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
                    self.sums.tell(error)
        return None


def _inode(path: Path) -> _Inode | None:
    """None where no regular file lies."""
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

"""Samples in tar files in the layout of webdataset: consecutive files whose names are equal up to
the first dot are one sample.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ..kernel.errors import DataError
from .order import shuffled
from .small_files import open_regular

__all__ = ["TarShards"]

KEY = "__key__"
_MAX_FILE_BYTES = 4 << 30
_MAX_HEADER_BYTES = 1 << 20
"""Maximum size in bytes of a long name, or of the headers before a file."""


class TarShards:
    """A stream of the samples of tar files, as `{"__key__": "a/0001", "jpg": b"...", "cls": b"7"}`,
    or what `decode` makes of that.

    Each epoch reads the shards in another order, unless `shuffle` is False; a shard is read from
    front to back. The state is a shard and a place in it, so a run resumes there without reading
    what came before. Raises `DataError` if there are no shards, and, while it is read, for files
    that are not tar files.
    """

    def __init__(
        self,
        shards: Sequence[str | Path],
        decode: Callable[[dict[str, Any]], Any] | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if isinstance(shards, str | Path) or not shards:
            raise DataError(f"TarShards takes a list of paths of tar files, not {shards!r}")
        self.shards = [Path(shard) for shard in shards]
        self.decode, self.shuffle, self.seed = decode, shuffle, seed
        self._epoch = 0
        self._shard = self._offset = 0
        self._resumed = False

    def set_epoch(self, epoch: int) -> None:
        """Read the shards in the order of an epoch."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next sample: the shard in the epoch's order, the place in it, and
        the number of shards."""
        return {"shard": self._shard, "offset": self._offset, "shards": len(self.shards)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `DataError` for a state of another number of shards."""
        match state:
            case {"shard": int(shard), "offset": int(offset), "shards": int(number)}:
                if number != len(self.shards):
                    raise DataError(
                        f"there were {number} tar shards, and are {len(self.shards)}: their order "
                        "would be another. Give those that the run began with"
                    )
                self._shard, self._offset, self._resumed = shard, offset, True
            case _:
                raise DataError(f"not the state of TarShards: {dict(state)!r:.200}")

    def __iter__(self) -> Iterator[Any]:
        if not self._resumed:
            self._shard = self._offset = 0
        self._resumed = False
        order = self._order()
        while self._shard < len(order):
            for sample, after in _samples(self.shards[order[self._shard]], self._offset):
                self._shard, self._offset = self._shard + (not after), after
                yield self.decode(sample) if self.decode else sample

    def _order(self) -> list[int]:
        number = len(self.shards)
        if not self.shuffle:
            return list(range(number))
        return [int(index) for index in shuffled(number, self.seed, self._epoch)[:]]


def _samples(path: Path, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the samples from a place on, each with the place of the next sample; 0 after the
    last."""
    sample: dict[str, Any] = {}
    for name, at, content in _files(path, offset):
        folder, _, base = name.rpartition("/")
        stem, _, kind = base.partition(".")
        key = f"{folder}/{stem}" if folder else stem
        if sample and sample[KEY] != key:
            yield sample, at
            sample = {}
        if kind in sample:
            raise DataError(f"{path} holds {name!r} twice, at byte {at} again")
        sample = {KEY: key, **sample, kind: content}
    if not sample:
        raise DataError(f"{path} holds no files: it is an empty tar shard")
    yield sample, 0


def _files(path: Path, offset: int) -> Iterator[tuple[str, int, bytes]]:
    """Yield name, place and content of the files from a place on."""
    try:
        with open_regular(path) as opened:
            raw: Any = _Limited(opened)
            raw.seek(offset)
            with tarfile.open(fileobj=raw, mode="r:") as tar:
                at = offset
                while member := tar.next():
                    if not 0 <= member.size <= min(_MAX_FILE_BYTES, raw.left(member.offset_data)):
                        raise tarfile.ReadError(
                            f"{member.name!r:.200}, at byte {at}, has {member.size} bytes by its "
                            f"header; {_MAX_FILE_BYTES} are read, and none after the file's end"
                        )
                    if member.isfile():
                        yield member.name, at, raw.content(tar, member)
                    at = tar.offset
                    tar.members = []  # type: ignore[attr-defined]  # it keeps all, else
            opened.seek(at)
            if opened.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError(f"it is truncated at byte {at}")
    except (OSError, ValueError, OverflowError, RecursionError, tarfile.TarError) as error:
        raise DataError(f"{path} cannot be read as a tar file: {error!s:.400}") from error


class _Limited:
    """A file that limits the size of each read: tarfile allocates as much memory as a header says,
    and reads to the end for a size below 0."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._most = file, _MAX_HEADER_BYTES
        self.seek, self.tell = file.seek, file.tell

    def left(self, start: int) -> int:
        """Return the number of bytes from a place on."""
        return os.fstat(self._file.fileno()).st_size - start

    def read(self, size: int) -> bytes:
        """Read bytes. Raises `tarfile.ReadError` for a larger size than the limit."""
        if not 0 <= size <= self._most:
            raise tarfile.ReadError(f"a header before byte {self.tell()} has {size} bytes")
        return self._file.read(size)

    def content(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
        """Return the bytes of a regular file."""
        self._most = max(member.size, _MAX_HEADER_BYTES)
        try:
            file = tar.extractfile(member)
            assert file is not None, "regular files have one"
            return file.read()
        finally:
            self._most = _MAX_HEADER_BYTES

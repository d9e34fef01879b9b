"""Samples in tar files, as webdataset lays them out: files that stand next to each other, of one
name but for what follows its first dot, are a sample.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..kernel.errors import DataError
from .order import shuffled

__all__ = ["TarShards"]

KEY = "__key__"


class TarShards:
    """A stream of the samples of tar files, as `{"__key__": "a/0001", "jpg": b"...", "cls": b"7"}`,
    or what `decode` makes of that.

    Each epoch goes through the shards in another order, unless `shuffle` is False; within one the
    order is the file's, so that it is read from the front. Its state is a shard and a place in it:
    a run resumes there without reading what was before. Raises `DataError` for no shards, and,
    while it is read, for files that are none.
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
        """Take the shards in the order of that epoch."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """The next sample: in which shard of the epoch, where there, and of how many."""
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
    """The samples from a place on, each with the place of the next; 0 after the last."""
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
    """Name, place and content of the files from a place on."""
    try:
        with open(path, "rb") as raw:
            raw.seek(offset)
            with tarfile.open(fileobj=raw, mode="r:") as tar:
                at = offset
                while member := tar.next():
                    if member.isfile():
                        content = tar.extractfile(member)
                        assert content is not None, "regular files have one"
                        yield member.name, at, content.read()
                    at = tar.offset
                    tar.members = []  # type: ignore[attr-defined]  # it keeps all, else
            raw.seek(at)
            if raw.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError(f"it is cut at byte {at}")
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{path} cannot be read as a tar file: {error}") from error

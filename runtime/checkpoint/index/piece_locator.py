"""Finds the pieces of a tensor and their files, from as few headers as possible."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...kernel.errors import CheckpointDamaged
from ...kernel.paths import Place
from ...kernel.shards import Box, Kind, Region, TensorInfo
from ..format import regions, strict_json
from ..format.safetensors import Entry, TensorFile, is_shape
from ..gc_paused import gc_paused
from ..manifest import FileEntry, Manifest
from ..storage.protocol import read_small
from ..writer import PARTS
from .entries import INDEX, Index, Stride, TensorEntry

__all__ = ["Lookup", "Stored", "index_of", "read_index"]

_MAX_INDEX_BYTES = 1 << 30


@dataclass(frozen=True)
class Stored:
    """A piece of a tensor, in a file."""

    file: TensorFile
    entry: Entry
    shape: tuple[int, ...]
    region: Region | None

    @property
    def info(self) -> TensorInfo:
        """Return dtype and shape of the whole tensor."""
        return TensorInfo(self.entry.dtype, self.shape)


class Lookup:
    """Finds pieces of tensors. Opens each file that it needs once; without an index, all files of a
    kind."""

    def __init__(self, folder: Place, manifest: Manifest) -> None:
        self.folder = folder
        self._files = {entry.name: entry for entry in manifest.files}
        self._parts: dict[tuple[str, int], list[FileEntry]] = {}
        for entry in manifest.files:
            if entry.name != INDEX:
                self._parts.setdefault((entry.kind, entry.part), []).append(entry)
        self._opened: dict[tuple[str, int], dict[str, list[Stored]]] = {}
        self._index: Index | None = None
        self._made: dict[Kind, dict[str, TensorEntry]] = {}
        self.headers: Mapping[str, TensorFile] = {}
        """Files whose headers were read already, by name."""

    def tensors(self, kind: Kind) -> Mapping[str, TensorEntry]:
        """Return the entries of all tensors of a kind, by name. An index leaves out random
        states."""
        if INDEX not in self._files:
            return self.in_headers(kind)
        if self._index is None:
            with gc_paused():
                self._index = read_index(self.folder, self._files[INDEX], len(self._files))
        return self._index.kinds[kind]

    def in_headers(self, kind: Kind) -> Mapping[str, TensorEntry]:
        """Return the same entries from the headers of all files of the kind."""
        if kind not in self._made:
            index = Index()
            for each, part in sorted(self._parts):
                if each == kind:
                    _add(index, kind, part, self.in_part(kind, part))
            self._made[kind] = index.kinds[kind]
        return self._made[kind]

    def pieces(
        self, kind: Kind, name: str, known: TensorEntry, region: Region | None
    ) -> list[Stored]:
        """Return all pieces that overlap the region."""
        found: list[Stored] = []
        for part in known.parts(region):
            of_part = self.in_part(kind, part).get(name, [])
            for stored in of_part:
                if stored.info != known.info:
                    raise stored.file.damaged(
                        f"{name!r:.200} is {stored.info}, and not {known.info}"
                    )
            found += of_part
        return found

    def in_part(self, kind: Kind, part: int) -> Mapping[str, list[Stored]]:
        """Return the tensors in the file of a part, by name; empty if the file does not exist."""
        key = kind, part
        if key not in self._opened:
            found: dict[str, list[Stored]] = {}
            with gc_paused():
                for entry in self._parts.get(key, ()):
                    file = self.headers.get(entry.name) or _file(self.folder, entry)
                    for name, pieces in _by_name(file).items():
                        found.setdefault(name, []).extend(pieces)
            self._opened[key] = found
        return self._opened[key]


def read_index(folder: Place, entry: FileEntry, num_files: int) -> Index:
    """Read the index of a checkpoint. Raises `CheckpointDamaged` if it is not as it was written."""
    path = folder / entry.name
    raw = read_small(path, min(entry.num_bytes, _MAX_INDEX_BYTES))
    if (len(raw), zlib.crc32(raw)) != (entry.num_bytes, entry.crc32):
        raise CheckpointDamaged(
            f"{path}: is {len(raw)} bytes, CRC-32 {zlib.crc32(raw):08x}, and should be "
            f"{entry.num_bytes}, {entry.crc32:08x}"
        )
    return Index.from_bytes(raw, str(path), num_files)


def index_of(folder: Place, entries: Iterable[FileEntry], leave_out: str) -> Index:
    """Return the index of these files, in order of parts, without tensors whose name begins with
    `leave_out`.
    """
    index = Index()
    for entry in entries:
        by_name = _by_name(_file(folder, entry))
        wanted = {name: each for name, each in by_name.items() if not name.startswith(leave_out)}
        _add(index, entry.kind, entry.part, wanted)
    return index


def _add(index: Index, kind: Any, part: int, by_name: Mapping[str, list[Stored]]) -> None:
    for name, pieces in by_name.items():
        for stored in pieces:
            region = stored.region or Box((0,) * len(stored.shape), stored.shape)
            try:
                index.add(kind, name, stored.info, [Stride(part, region)])
            except ValueError as error:
                raise stored.file.damaged(str(error)) from error


def _file(folder: Place, entry: FileEntry) -> TensorFile:
    return TensorFile(folder / entry.name, entry.num_bytes)


def _by_name(file: TensorFile) -> dict[str, list[Stored]]:
    raw = file.metadata.get(PARTS, "{}").encode(errors="surrogatepass")
    labels: Any = strict_json.parse(raw, str(file.path))
    if not isinstance(labels, dict) or not labels.keys() <= file.entries.keys():
        raise file.damaged(f"describes parts that it does not hold: {labels!r:.200}")
    found: dict[str, list[Stored]] = {}
    for key, item in file.entries.items():
        name, shape, region = key, item.shape, None
        if key in labels:
            try:
                name, shape, region = _read_label(labels[key], item.shape)
            except ValueError as error:
                raise file.damaged(f"{key!r:.200} {item.shape}: {error}") from error
        found.setdefault(name, []).append(Stored(file, item, shape, region))
    return found


def _read_label(label: Any, sizes: tuple[int, ...]) -> tuple[str, tuple[int, ...], Region]:
    match label:
        case {"name": str(name), "shape": dims, **rest} if is_shape(dims):
            shape, region = tuple(dims), regions.from_json(rest)
            regions.check(region, shape)
            if regions.result_shape(region, shape) == sizes:
                return name, shape, region
    raise ValueError(f"cannot be the part {label!r:.200}")

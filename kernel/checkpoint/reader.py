"""Reads any region of any tensor, however many pieces it was cut into, and by whom."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from ..contract import Box, Kind, Region, TensorInfo
from ..errors import CheckpointDamaged, CheckpointMismatch
from . import regions, strict_json
from .host import host_bytes, memory, num_bytes
from .manifest import MANIFEST, is_altered, read_manifest
from .places import OpenFile, Place, Url, place, storage_of
from .safetensors import Entry, TensorFile, is_shape
from .writer import PARTS

__all__ = ["CheckpointReader"]

_BUFFER_BYTES = 16 << 20


@dataclass(frozen=True)
class _Stored:
    """A piece of a tensor, in a file."""

    file: TensorFile
    entry: Entry
    shape: tuple[int, ...]
    region: Region | None


_Overlap = tuple[_Stored, Box, int, Box]
"""A piece, a box of it, the elements before that in its file, what of it lies in a region."""


class CheckpointReader:
    """Implements `contract.Reader` for one checkpoint folder; needs no process group.

    Opens the files of a kind when that kind is first asked for, and then reads only the bytes
    that a region overlaps. Host memory: the result and a fixed buffer.
    """

    def __init__(self, folder: str | os.PathLike[str] | Url) -> None:
        """Raises `CheckpointNotFound` or `CheckpointDamaged`."""
        self.folder: Place = place(folder)
        self.manifest = read_manifest(self.folder)
        self._stored: dict[str, dict[str, list[_Stored]]] = {}
        self._aliases = {name: group[0] for group in self.manifest.tied for name in group}
        self._buffer = host_bytes(0)
        self._short_bytes = storage_of(self.folder).short_bytes

    def names(self, kind: Kind) -> Sequence[str]:
        """All names of that kind, sorted; of tied weights the one that is stored."""
        return sorted(self._index(kind))

    def info(self, kind: Kind, name: str) -> TensorInfo:
        """Its dtype and global shape. Raises `CheckpointMismatch` when there is no such tensor."""
        first = self._pieces(kind, name)[0]
        return TensorInfo(first.entry.dtype, first.shape)

    def read(self, kind: Kind, name: str, region: Region | None = None) -> Tensor:
        """A new host tensor with the stored dtype: the whole, a box, or a flat range (1-d).

        Raises `CheckpointMismatch` for an unknown name or a region outside the tensor, and
        `CheckpointDamaged` when the stored pieces leave a gap or overlap.
        """
        pieces = self._pieces(kind, name)
        dtype, shape = pieces[0].entry.dtype, pieces[0].shape
        try:
            regions.check(region, shape)
        except ValueError as error:
            raise CheckpointMismatch(f"{self.folder}: {kind} {name!r}: {error}") from error
        # All is found before any of it gets memory: a forged shape must not ask for the moon.
        wanted = [
            (box, before, self._overlaps(f"{kind} {name!r}", pieces, box))
            for box, before in regions.boxes(region, shape)
        ]
        result = regions.result_shape(region, shape)
        out = host_bytes(num_bytes(dtype, result))
        for box, before, found in wanted:
            start, size = before * dtype.itemsize, math.prod(box.sizes) * dtype.itemsize
            self._fill(found, box, out[start : start + size].view(*box.sizes, dtype.itemsize))
        return out.view(dtype).view(result)

    def verify(self) -> list[str]:
        """Reads every byte; says, a line each, which files or tensors are not as written."""
        problems = self.damaged_files()
        for kind in () if problems else get_args(Kind):
            try:
                for name, pieces in self._index(kind).items():
                    for box, _ in regions.boxes(None, pieces[0].shape):
                        self._overlaps(f"{kind} {name!r}", pieces, box)
            except CheckpointDamaged as error:
                problems.append(str(error))
        return problems

    def damaged_files(self, part: int = 0, num_parts: int = 1) -> list[str]:
        """Reads every byte of so many parts' share of the files, those that ranks of the same
        number wrote; says, a line each, which are not as written."""
        problems = []
        if part == 0 and is_altered(self.folder):
            problems.append(f"{self.folder / MANIFEST}: is not as it was written")
        for file in self.manifest.files:
            if file.part % num_parts != part:
                continue
            try:
                crc = TensorFile(self.folder / file.name, file.num_bytes).crc32()
                if crc != file.crc32:
                    problems.append(
                        f"{self.folder / file.name}: CRC-32 is {crc:08x}, was {file.crc32:08x}"
                    )
            except CheckpointDamaged as error:
                problems.append(str(error))
        return problems

    def _pieces(self, kind: Kind, name: str) -> list[_Stored]:
        index = self._index(kind)
        stored = self._aliases.get(name, name) if kind == "weights" else name
        if name in index or stored in index:
            return index[name if name in index else stored]
        raise CheckpointMismatch(
            f"{self.folder}: no {kind} tensor {name!r}; it has {len(index)}: {sorted(index)[:5]}..."
        )

    def _index(self, kind: Kind) -> dict[str, list[_Stored]]:
        if kind not in self._stored:
            index: dict[str, list[_Stored]] = {}
            for entry in self.manifest.files:
                if entry.kind == kind:
                    file = TensorFile(self.folder / entry.name, entry.num_bytes)
                    for name, stored in _pieces_in(file):
                        first = index.setdefault(name, [stored])[0]
                        if (first.shape, first.entry.dtype) != (stored.shape, stored.entry.dtype):
                            raise file.damaged(
                                f"{name!r} is {stored.entry.dtype} {stored.shape}, and "
                                f"{first.entry.dtype} {first.shape} in {first.file.path.name}"
                            )
                        if first is not stored:
                            index[name].append(stored)
            self._stored[kind] = index
        return self._stored[kind]

    def _overlaps(self, what: str, pieces: list[_Stored], box: Box) -> list[_Overlap]:
        found = [
            (piece, stored, before, common)
            for piece in pieces
            for stored, before in regions.boxes(piece.region, piece.shape)
            if (common := regions.intersect(stored, box))
        ]
        if problem := regions.tile([common for *_, common in found], box):
            raise CheckpointDamaged(f"{self.folder}: {what}: {problem}")
        return found

    def _fill(self, found: list[_Overlap], box: Box, out: Tensor) -> None:
        """Fill `out`, uint8 of shape (*box.sizes, itemsize), with the tensor's bytes in `box`."""
        if not len(self._buffer):
            self._buffer = host_bytes(_BUFFER_BYTES)
        for piece, stored, before, common in found:
            itemsize = piece.entry.dtype.itemsize
            # The stored bytes as a tensor without memory: its strides say where in the file.
            on_disk = torch.empty((*stored.sizes, itemsize), dtype=torch.uint8, device="meta")
            source = _narrow(on_disk, common, stored)
            start = piece.entry.start + before * itemsize
            with piece.file.open() as file:
                self._copy(file, start, source, _narrow(out, common, box))

    def _copy(self, file: OpenFile, start: int, source: Tensor, out: Tensor) -> None:
        """Copy a strided view of the file, `source`, into memory of the same shape."""
        first = start + int(source.storage_offset())
        if source.is_contiguous() and out.is_contiguous():
            file.read_into(first, memory(out))
            return
        layout = list(zip(source.shape, source.stride(), strict=True))
        span = 1 + sum((size - 1) * stride for size, stride in layout)
        run = 1
        for size, stride in reversed(layout):
            run *= size if stride == run else 1
        if span <= _BUFFER_BYTES and (span <= 2 * source.numel() or run < self._short_bytes):
            buffer = self._buffer[:span]
            file.read_into(first, memory(buffer))
            out.copy_(buffer.as_strided(source.shape, source.stride()))
            return
        dim = next(dim for dim, size in enumerate(source.shape) if size > 1)
        for half, target in zip(source.chunk(2, dim), out.chunk(2, dim), strict=True):
            self._copy(file, start, half, target)


def _pieces_in(file: TensorFile) -> list[tuple[str, _Stored]]:
    raw = file.metadata.get(PARTS, "{}").encode(errors="surrogatepass")
    labels: Any = strict_json.parse(raw, str(file.path))
    if not isinstance(labels, dict) or not labels.keys() <= file.entries.keys():
        raise file.damaged(f"describes parts that it does not hold: {labels!r:.200}")
    found = []
    for key, entry in file.entries.items():
        name, shape, region = key, entry.shape, None
        if key in labels:
            try:
                name, shape, region = _read_label(labels[key], entry.shape)
            except ValueError as error:
                raise file.damaged(f"{key!r} {entry.shape}: {error}") from error
        found.append((name, _Stored(file, entry, shape, region)))
    return found


def _read_label(label: Any, sizes: tuple[int, ...]) -> tuple[str, tuple[int, ...], Region]:
    match label:
        case {"name": str(name), "shape": dims, **rest} if is_shape(dims):
            shape, region = tuple(dims), regions.from_json(rest)
            regions.check(region, shape)
            if regions.result_shape(region, shape) == sizes:
                return name, shape, region
    raise ValueError(f"cannot be the part {label!r:.200}")


def _narrow(tensor: Tensor, box: Box, within: Box) -> Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset - within.offsets[dim], size)
    return tensor

"""Reads any region of any tensor, however many pieces it was cut into, and by whom."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from ..kernel.errors import CheckpointDamaged, CheckpointMismatch
from ..kernel.paths import Place, Url, place
from ..kernel.shards import Box, Kind, Region, TensorInfo
from .buffers import host_bytes, memory, num_bytes
from .catalog import step_of
from .format import regions
from .format.safetensors import TensorFile, read_whole
from .index.entries import INDEX, TensorEntry
from .index.piece_locator import Lookup, Stored, read_index
from .manifest import MANIFEST, read_manifest
from .storage.protocol import OpenFile, storage_of

__all__ = ["CheckpointReader", "WithoutOptimizer"]

_BUFFER_BYTES = 16 << 20


_Overlap = tuple[Stored, Box, int, Box]
"""A piece, a box of it, the elements before that in its file, what of it lies in a region."""


class CheckpointReader:
    """Implements `shards.Reader` for one checkpoint folder; needs no process group.

    Opens the files of a kind on its first use, or, where there is an index, the files that a region
    lies in; and then reads only the bytes that the region overlaps. Host memory: the result, a
    fixed buffer, and the headers of these files.
    """

    def __init__(self, folder: str | os.PathLike[str] | Url) -> None:
        """Raises `CheckpointNotFound` or `CheckpointDamaged`."""
        self.folder: Place = place(folder)
        self.manifest = read_manifest(self.folder)
        self._lookup = Lookup(self.folder, self.manifest)
        self._aliases = {name: group[0] for group in self.manifest.tied for name in group}
        self._buffer = host_bytes(0)
        self._short_bytes = storage_of(self.folder).short_bytes

    def names(self, kind: Kind) -> Sequence[str]:
        """All names of that kind, sorted; of tied weights the one that is stored. Where there is an
        index, it leaves out the random states of ranks: see `own`."""
        return sorted(self._lookup.tensors(kind))

    def info(self, kind: Kind, name: str) -> TensorInfo:
        """Its dtype and global shape. Raises `CheckpointMismatch` when there is no such tensor."""
        return self._known(kind, name)[1].info

    def read(
        self, kind: Kind, name: str, region: Region | None = None, out: Tensor | None = None
    ) -> Tensor:
        """A host tensor with the stored dtype: the whole, a box, or a flat range (1-d). A new one,
        or `out`, a contiguous one of that dtype and shape.

        Raises `CheckpointMismatch` for an unknown name, a region outside the tensor or another
        `out`, and `CheckpointDamaged` when the stored pieces leave a gap or overlap.
        """
        # Locate all pieces before allocating: a forged shape must not cause a huge allocation.
        known, wanted = self.plan(kind, name, region)
        dtype, shape = known.info.dtype, known.info.shape
        result = regions.result_shape(region, shape)
        if out is None:
            out = host_bytes(num_bytes(dtype, result)).view(dtype).view(result)
        elif (out.dtype, tuple(out.shape)) != (dtype, result):
            raise CheckpointMismatch(
                f"{self.folder}: {kind} {name!r} is {dtype} {result}, and is to be read into "
                f"{out.dtype} {tuple(out.shape)}"
            )
        raw = out.detach().view(-1).view(torch.uint8)
        for box, before, found in wanted:
            start, size = before * dtype.itemsize, math.prod(box.sizes) * dtype.itemsize
            self._fill(found, box, raw[start : start + size].view(*box.sizes, dtype.itemsize))
        return out

    def plan(
        self, kind: Kind, name: str, region: Region | None = None
    ) -> tuple[TensorEntry, list[tuple[Box, int, list[_Overlap]]]]:
        """Returns a tensor's entry and, for each box of the region, the number of elements before
        it and the parts of stored pieces that lie in it. Reads headers only; raises as `read` does.
        """
        stored, known = self._known(kind, name)
        shape = known.info.shape
        try:
            regions.check(region, shape)
        except ValueError as error:
            raise CheckpointMismatch(f"{self.folder}: {kind} {name!r}: {error}") from error
        pieces = self._lookup.pieces(kind, stored, known, region)
        return known, [
            (box, before, self._overlaps(f"{kind} {name!r}", pieces, box))
            for box, before in regions.boxes(region, shape)
        ]

    def own(self, kind: Kind, part: int, prefix: str) -> dict[str, Tensor]:
        """The whole tensors that rank `part` wrote under names with that prefix, by their names
        without it."""
        return {
            name.removeprefix(prefix): self._whole(name, pieces)
            for name, pieces in self._lookup.in_part(kind, part).items()
            if name.startswith(prefix)
        }

    def verify(self) -> list[str]:
        """Reads every byte, and the headers of local files with the safetensors package as well;
        returns, a line each, which files or tensors are not as written."""
        problems = [*self._contradictions(), *self.damaged_files()]
        problems = problems or [*self._read_otherwise()]
        for kind in () if problems else get_args(Kind):
            try:
                for name, known in self._lookup.in_headers(kind).items():
                    pieces = self._lookup.pieces(kind, name, known, None)
                    for box, _ in regions.boxes(None, known.info.shape):
                        self._overlaps(f"{kind} {name!r}", pieces, box)
            except CheckpointDamaged as error:
                problems.append(str(error))
        return problems

    def _read_otherwise(self) -> Iterator[str]:
        for file in self.manifest.files:
            path = self.folder / file.name
            if file.name == INDEX or not isinstance(path, Path):
                continue
            ours = {name: (e.dtype, e.shape) for name, e in TensorFile(path).entries.items()}
            try:
                read = read_whole(path)
            except CheckpointDamaged as error:
                yield str(error)
                continue
            theirs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in read.items()}
            if other := dict(ours.items() ^ theirs.items()):
                yield f"{path}: the safetensors package reads {', '.join(sorted(other))} otherwise"

    def _contradictions(self) -> Iterator[str]:
        """Contradictions in a manifest whose checksum is right."""
        where, step = self.folder / MANIFEST, self.manifest.step
        state, named = self.manifest.state, step_of(self.folder)
        if named not in (None, step):
            yield f"{where}: is of step {step}, and its folder is named for step {named}"
        if step and not state:
            yield f"{where}: its state is empty, and it is of step {step}"
        elif state.get("step", step) != step:
            yield f"{where}: is of step {step}, and its state of {state['step']!r:.40}"

    def damaged_files(self, part: int = 0, num_parts: int = 1) -> list[str]:
        """Reads every byte of so many parts' share of the files, those that ranks of the same
        number wrote; says, a line each, which are not as written."""
        problems = []
        for file in self.manifest.files:
            if file.part % num_parts != part:
                continue
            try:
                if file.name == INDEX:
                    read_index(self.folder, file, len(self.manifest.files))
                    continue
                crc = TensorFile(self.folder / file.name, file.num_bytes).crc32()
                if crc != file.crc32:
                    problems.append(
                        f"{self.folder / file.name}: CRC-32 is {crc:08x}, was {file.crc32:08x}"
                    )
            except CheckpointDamaged as error:
                problems.append(str(error))
        return problems

    def _known(self, kind: Kind, name: str) -> tuple[str, TensorEntry]:
        """The name under which it is stored, and what is known of it."""
        tensors = self._lookup.tensors(kind)
        stored = self._aliases.get(name, name) if kind == "weights" else name
        for each in (name, stored):
            if each in tensors:
                return each, tensors[each]
        raise CheckpointMismatch(
            f"{self.folder}: no {kind} tensor {name!r}; it has {len(tensors)}: "
            f"{sorted(tensors)[:5]}..."
        )

    def _whole(self, name: str, pieces: list[Stored]) -> Tensor:
        if len(pieces) > 1 or pieces[0].region is not None:
            raise pieces[0].file.damaged(f"{name!r} is not whole")
        return pieces[0].file.read(name)

    def _overlaps(self, what: str, pieces: list[Stored], box: Box) -> list[_Overlap]:
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


class WithoutOptimizer(CheckpointReader):
    """A checkpoint as if it held nothing of the optimizer."""

    def names(self, kind: Kind) -> Sequence[str]:
        """As of any, but for the optimizer's."""
        return () if kind == "optimizer" else super().names(kind)


def _narrow(tensor: Tensor, box: Box, within: Box) -> Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset - within.offsets[dim], size)
    return tensor

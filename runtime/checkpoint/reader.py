"""Reads any region of any tensor, into whatever pieces a driver has sharded it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
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
from .format.safetensors import TensorFile, header_by_safetensors
from .gc_paused import gc_paused
from .index.entries import INDEX, TensorEntry
from .index.piece_locator import Lookup, Stored, read_index
from .manifest import FileEntry, read_manifest
from .storage.local import forget_cached
from .storage.protocol import MANIFEST, OpenFile, storage_of

__all__ = ["CheckpointReader", "WithoutOptimizer"]

_BUFFER_BYTES = 16 << 20
_MAX_REPORTED = 20


_Overlap = tuple[Stored, Box, int, Box]
"""A piece, a box of the piece, the number of elements before the box in the file, and the part of
the box in a region."""


class CheckpointReader:
    """The reader of one checkpoint folder, a `shards.Reader`; needs no process group.

    It opens the files of a kind at the first use, or, with an index, the files that hold a region.
    It reads only the bytes that the region overlaps. Host memory: the result, a fixed buffer, and
    the headers of these files.
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
        """Return all names of a kind, sorted; for tied weights the stored name. An index leaves out
        the random states of ranks: see `own`."""
        return sorted(self._lookup.tensors(kind))

    def info(self, kind: Kind, name: str) -> TensorInfo:
        """Return a tensor's dtype and global shape. Raises `CheckpointMismatch` if the tensor does
        not exist."""
        return self._known(kind, name)[1].info

    def read(
        self, kind: Kind, name: str, region: Region | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Read a tensor, a box of it, or a flat range (1-d) into host memory, with the stored
        dtype. The result is a new tensor, or `out`, a contiguous tensor of that dtype and shape.

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
                f"{self.folder}: {kind} {name!r:.200} is {dtype} {result}, and is to be read into "
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
        """Return a tensor's entry and, for each box of the region, the number of elements before it
        and the parts of stored pieces in it. Reads headers only; raises as `read` does.
        """
        stored, known = self._known(kind, name)
        shape = known.info.shape
        try:
            regions.check(region, shape)
        except ValueError as error:
            raise CheckpointMismatch(f"{self.folder}: {kind} {name!r:.200}: {error}") from error
        pieces = self._lookup.pieces(kind, stored, known, region)
        return known, [
            (box, before, self._overlaps(f"{kind} {name!r:.200}", pieces, box))
            for box, before in regions.boxes(region, shape)
        ]

    def own(self, kind: Kind, part: int, prefix: str) -> dict[str, Tensor]:
        """Read the whole tensors that rank `part` wrote under names with a prefix; return them by
        their names without the prefix."""
        return {
            name.removeprefix(prefix): self._whole(name, pieces)
            for name, pieces in self._lookup.in_part(kind, part).items()
            if name.startswith(prefix)
        }

    def verify(self) -> list[str]:
        """Read every byte, and the headers of local files with the safetensors package as well.
        Return a line for each file or tensor that is not as it was written."""
        with gc_paused():
            headers: dict[str, TensorFile] = {}
            problems = [*self._contradictions(), *self.damaged_files(headers=headers)]
            problems = problems or [*self._safetensors_differences(headers)]
            self._lookup.headers = headers
            for kind in () if problems else get_args(Kind):
                try:
                    self._verify_pieces(kind)
                except CheckpointDamaged as error:
                    problems.append(str(error))
            return problems

    def _verify_pieces(self, kind: Kind) -> None:
        for name, known in self._lookup.in_headers(kind).items():
            pieces = self._lookup.pieces(kind, name, known, None)
            for box, _ in regions.boxes(None, known.info.shape):
                self._overlaps(f"{kind} {name!r:.200}", pieces, box)

    def _safetensors_differences(self, headers: Mapping[str, TensorFile]) -> Iterator[str]:
        for name, file in headers.items():
            path = self.folder / name
            if not isinstance(path, Path):
                continue
            ours = {name: (entry.dtype, entry.shape) for name, entry in file.entries.items()}
            try:
                theirs = header_by_safetensors(path)
            except CheckpointDamaged as error:
                yield str(error)
                continue
            if ours != theirs:
                other = sorted({name for name, _ in ours.items() ^ theirs.items()})
                yield f"{path}: the safetensors package reads {', '.join(other):.400} otherwise"

    def _contradictions(self) -> Iterator[str]:
        """Describe contradictions in a manifest whose checksum is right."""
        where, step = self.folder / MANIFEST, self.manifest.step
        state, named = self.manifest.state, step_of(self.folder)
        if named not in (None, step):
            yield f"{where}: is of step {step}, and its folder is named for step {named}"
        if step and not state:
            yield f"{where}: its state is empty, and it is of step {step}"
        elif state.get("step", step) != step:
            yield f"{where}: is of step {step}, and its state of {state['step']!r:.40}"

    def damaged_files(
        self, part: int = 0, num_parts: int = 1, headers: dict[str, TensorFile] | None = None
    ) -> list[str]:
        """Read every byte of this part's share of the files, those that ranks of the same number
        modulo `num_parts` wrote. Return a line for each damaged file, and the number of further
        ones. `headers` is filled with the files, by name."""
        mine = [file for file in self.manifest.files if file.part % num_parts == part]
        problems = [problem for file in mine if (problem := self._damage_twice(file, headers))]
        if (more := len(problems) - _MAX_REPORTED) > 0:
            problems[_MAX_REPORTED:] = [f"{self.folder}: {more} more files are not as written"]
        return problems

    def _damage_twice(self, file: FileEntry, headers: dict[str, TensorFile] | None) -> str:
        """Return the damage of a file if it is found again when the file is read once more from the
        disk."""
        path = self.folder / file.name
        if not self._damage(file, headers):
            return ""
        if isinstance(path, Path):
            forget_cached(path)
        return self._damage(file, headers)

    def _damage(self, file: FileEntry, headers: dict[str, TensorFile] | None) -> str:
        path = self.folder / file.name
        try:
            if file.name == INDEX:
                read_index(self.folder, file, len(self.manifest.files))
                return ""
            read = TensorFile(path, file.num_bytes)
            if headers is not None:
                headers[file.name] = read
            crc = read.crc32()
        except CheckpointDamaged as error:
            return str(error)
        return "" if crc == file.crc32 else f"{path}: CRC-32 is {crc:08x}, was {file.crc32:08x}"

    def _known(self, kind: Kind, name: str) -> tuple[str, TensorEntry]:
        """Return a tensor's stored name and its entry."""
        tensors = self._lookup.tensors(kind)
        stored = self._aliases.get(name, name) if kind == "weights" else name
        for each in (name, stored):
            if each in tensors:
                return each, tensors[each]
        raise CheckpointMismatch(
            f"{self.folder}: no {kind} tensor {name!r:.200}; it has {len(tensors)}: "
            f"{sorted(tensors)[:5]!s:.400}..."
        )

    def _whole(self, name: str, pieces: list[Stored]) -> Tensor:
        if len(pieces) > 1 or pieces[0].region is not None:
            raise pieces[0].file.damaged(f"{name!r:.200} is not whole")
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
            # A tensor without memory stands for the stored bytes: its strides give the places in
            # the file.
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
    """A view of a checkpoint without anything of the optimizer."""

    def names(self, kind: Kind) -> Sequence[str]:
        """Return the names of the wrapped reader, without those of the optimizer."""
        return () if kind == "optimizer" else super().names(kind)


def _narrow(tensor: Tensor, box: Box, within: Box) -> Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset - within.offsets[dim], size)
    return tensor

"""Finds the tensors in which two checkpoints of one step differ, and the ranks that wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from ..checkpoint import CheckpointReader
from ..checkpoint.index.piece_locator import Lookup, Stored
from ..kernel.paths import Place
from ..kernel.shards import Kind, Region
from .parting import Difference

__all__ = ["differing_tensors"]


class _Piece(NamedTuple):
    """A piece of a tensor, and the rank that wrote it."""

    rank: int
    stored: Stored


_Pieces = Mapping[tuple[str, Region | None], _Piece]
"""The pieces of all tensors of a kind, by the tensor's name and the piece's region."""


def differing_tensors(first: Place, second: Place) -> Iterator[Difference]:
    """Yield the tensors that differ in a bit, of two checkpoints that as many ranks wrote on one
    driver. Files with equal checksums are not read. Raises `CheckpointNotFound` and
    `CheckpointDamaged`."""
    readers = [CheckpointReader(folder) for folder in (first, second)]
    manifests = [reader.manifest for reader in readers]
    sums = [{f.name: (f.num_bytes, f.crc32) for f in each.files} for each in manifests]
    equal_files = {name for name, found in sums[0].items() if sums[1].get(name) == found}
    step, several = manifests[0].step, manifests[0].world_size > 1
    for kind in get_args(Kind):
        names = {file.name for each in manifests for file in each.files if file.kind == kind}
        if names <= equal_files:
            continue
        ours, theirs = (_pieces(reader, kind) for reader in readers)
        elsewhere = {name for name, _ in ours.keys() ^ theirs.keys()}
        for (name, region), piece in sorted(
            ours.items(), key=lambda item: (item[0][0], item[1].rank)
        ):
            if name in elsewhere:
                continue
            pair = piece.stored, theirs[name, region].stored
            files = {stored.file.path.name for stored in pair}
            if len(files) == 1 and files <= equal_files:
                continue
            where = f"saved by rank {piece.rank}" if several else ""
            if found := _differ(*(stored.file.read_entry(stored.entry) for stored in pair)):
                yield Difference(step, f"{kind} {name}", *found, where=where)
        for name in sorted(elsewhere):
            there = [any(name == known for known, _ in each) for each in (ours, theirs)]
            if not all(there):
                ours_is, theirs_is = ("there" if each else "none" for each in there)
                yield Difference(step, f"{kind} {name}", ours_is, theirs_is)
            elif found := _differ(*(reader.read(kind, name) for reader in readers)):
                yield Difference(step, f"{kind} {name}", *found)


def _pieces(reader: CheckpointReader, kind: Kind) -> _Pieces:
    lookup = Lookup(reader.folder, reader.manifest)
    return {
        (name, stored.region): _Piece(rank, stored)
        for rank in range(reader.manifest.world_size)
        for name, pieces in lookup.in_part(kind, rank).items()
        for stored in pieces
    }


def _differ(first: Tensor, second: Tensor) -> tuple[str, str, float | None] | None:
    """Return how two tensors differ: both in words, and the size of the difference relative to the
    first; None if all bits are equal."""
    kinds = [f"{each.dtype} {tuple(each.shape)}" for each in (first, second)]
    if kinds[0] != kinds[1]:
        return kinds[0], kinds[1], None
    bits = [each.reshape(-1).view(torch.uint8) for each in (first, second)]
    if torch.equal(*bits):
        return None
    wide = [_wide(each) for each in (first, second)]
    apart = int((wide[0] != wide[1]).sum())
    norms = [float(torch.linalg.vector_norm(each)) for each in (*wide, wide[0] - wide[1])]
    words = f"norm {norms[0]:.9g}, {apart} of {first.numel()} elements"
    return words, f"norm {norms[1]:.9g}", norms[2] / max(norms[0], 1e-30)


def _wide(tensor: Tensor) -> Tensor:
    """Return the elements in float64, of complex ones both parts."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.reshape(-1).double()

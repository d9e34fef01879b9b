"""The index of a checkpoint of many parts, joined in a tree while the checkpoint is written.

At the first level, every rank whose number is a multiple of `FEW` reads the headers of its own and
the next ranks' files. At the next level, every multiple of `FEW` squared reads the indexes that
these ranks wrote, and so on, until rank 0 has the whole index in a few lines. Each rank handles at
most `FEW` indexes at a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from ...kernel.paths import Place
from ..gc_paused import gc_paused
from ..manifest import FileEntry
from ..storage.protocol import storage_of
from ..writer import RNG
from .entries import FEW, INDEX, Index
from .piece_locator import index_of, read_index

__all__ = ["join_level", "num_levels"]


def num_levels(num_parts: int) -> int:
    """Return the number of levels at which indexes are joined; 0 if no index is needed."""
    levels = 0
    while num_parts > FEW**levels:
        levels += 1
    return levels if levels > 1 else 0


def join_level(
    place: Place, below: Sequence[FileEntry], level: int, rank: int, num_parts: int
) -> tuple[str, int, int] | None:
    """Join indexes at one level, after all ranks have finished the level before. Return name, size
    and checksum of the file that this rank wrote, if it joins at this level. `below`: the files of
    all ranks at the level before; at the first level, their tensor files."""
    width = FEW**level
    if rank % width:
        return None
    mine = sorted(
        (entry for entry in below if rank <= entry.part < rank + width),
        key=lambda entry: entry.part,
    )
    with gc_paused():
        if level == 1:
            index = index_of(place, mine, leave_out=f"{RNG}/")
        else:
            index = Index()
            for entry in mine:
                index.join(read_index(place, entry, num_parts))
                storage_of(place).remove(place / entry.name)
    last = level == num_levels(num_parts)
    name, raw = INDEX if last else f"index-{rank:05d}-{level}.json", index.to_bytes()
    storage_of(place).create(place / name, lambda: [memoryview(raw)])
    return name, len(raw), zlib.crc32(raw)

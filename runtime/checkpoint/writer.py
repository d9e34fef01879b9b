"""Writes pieces to files: selects the file of each piece, and labels parts of tensors.

A whole tensor is stored under its own name, so any tool can read the weights of a driver that does
not shard tensors. A part is stored under a key of its own, which the header's metadata describes:
`{"drivetrain": {key: {"name", "shape", "box" or "flat"}}}`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, get_args

from torch import Tensor

from ..kernel.contract import Engine, Session
from ..kernel.paths import Place
from ..kernel.shards import Piece
from .format import regions, safetensors
from .frozen import FrozenFile
from .manifest import FileEntry, FileKind, file_name

__all__ = ["PARTS", "RNG", "collect", "write_pieces"]

PARTS = "drivetrain"
"""The key of a header's metadata under which the parts are described."""
RNG = "rng"
"""State tensors `rng/<rank>/<name>` are the random state of that rank."""


def collect(engine: Engine, session: Session) -> list[Piece]:
    """Return the pieces that this rank saves, still on its devices; nothing is copied."""
    pieces = list(engine.shards())
    for name, tensor in session.rng_state().items():
        name = f"{RNG}/{session.world.rank}/{name}"
        pieces.append(Piece("state", name, tensor, tuple(tensor.shape)))
    return pieces


def write_pieces(
    folder: Place,
    pieces: Sequence[Piece],
    part: int,
    num_parts: int,
    frozen: FrozenFile | None = None,
) -> list[FileEntry]:
    """Write one file for each kind of pieces, synced, through host memory for one tensor. `frozen`:
    writes the pieces that it holds, or links to an earlier checkpoint's file of them. Raises
    `ValueError` or `TypeError` for a malformed piece, `OSError` naming the file."""
    of_kind: dict[FileKind, list[Piece]] = {kind: [] for kind in get_args(FileKind)}
    for piece in pieces:
        of_kind["frozen" if frozen and frozen.holds(piece) else piece.kind].append(piece)
    entries = []
    for kind, chosen in of_kind.items():
        if chosen:
            name = file_name(kind, part, num_parts)
            sources, metadata = _lay_out(chosen)
            write = frozen.write if frozen and kind == "frozen" else safetensors.write
            entries.append(FileEntry(name, *write(folder / name, sources, metadata)))
    return entries


def _lay_out(pieces: Sequence[Piece]) -> tuple[dict[str, safetensors.Source], dict[str, str]]:
    names = {piece.name for piece in pieces} | {safetensors.RESERVED}
    sources: dict[str, safetensors.Source] = {}
    parts: dict[str, Any] = {}
    for piece in pieces:
        regions.check(piece.region, piece.shape)
        shape = regions.result_shape(piece.region, piece.shape)
        if tuple(piece.tensor.shape) != shape:
            raise ValueError(
                f"{piece.name!r}: {piece.region} needs {shape}, not {piece.tensor.shape}"
            )
        key = piece.name
        if regions.is_whole(piece.region, piece.shape) and key != safetensors.RESERVED:
            shape = piece.shape
            if key in sources and piece.tensor.numel():
                raise ValueError(f"{key!r}: two pieces are all of this tensor")
        else:
            numbered = (f"{piece.name}#{number}" for number in itertools.count())
            key = next(k for k in numbered if k not in names and k not in sources)
            region = piece.region or next(regions.boxes(None, piece.shape))[0]
            parts[key] = {"name": piece.name, "shape": piece.shape} | regions.to_json(region)
        load = _loader(piece.tensor, shape)
        sources[key] = safetensors.Source(piece.tensor.dtype, shape, load)
    # transformers asks every file for this entry before it loads it.
    metadata = {"format": "pt"}
    return sources, metadata | ({PARTS: json.dumps(parts)} if parts else {})


def _loader(tensor: Tensor, shape: tuple[int, ...]) -> Callable[[], Tensor]:
    return lambda: tensor.detach().reshape(shape)

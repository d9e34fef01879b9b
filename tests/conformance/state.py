"""The state of a model and its optimizer, put together from what every rank would write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernel.contract import Engine
from ..kernel.errors import CheckpointError
from ..kernel.shards import Box, Kind, Piece, Reader
from .judge import LawBroken

__all__ = ["State", "assemble", "pieces", "pieces_of", "read_all", "whole_weights"]

KINDS: tuple[Kind, ...] = ("weights", "optimizer", "state")
State = dict[str, dict[str, Tensor]]
"""Kind -> name -> whole tensor."""


def pieces(engine: Engine) -> list[dict[str, Any]]:
    """Return this rank's pieces as plain values; for jobs."""
    return pieces_of(engine.shards())


def pieces_of(found: Iterable[Piece]) -> list[dict[str, Any]]:
    """Return pieces as plain values; for jobs."""
    return [
        {
            "kind": piece.kind,
            "name": piece.name,
            "tensor": piece.tensor.detach().cpu().clone(),
            "shape": list(piece.shape),
            "region": vars(piece.region) if piece.region else None,
            "is_box": isinstance(piece.region, Box),
        }
        for piece in found
    ]


def whole_weights(engine: Engine) -> dict[str, Tensor]:
    """Return all whole weights on this rank, under each of their names; for jobs."""
    with engine.full_params() as module:
        named = list(module.named_parameters(remove_duplicate=False))
        return {name: tensor.detach().cpu().clone() for name, tensor in named}


def assemble(ranks: Sequence[Iterable[dict[str, Any]]]) -> State:
    """Return the whole tensors. Raises `LawBroken` unless the pieces of all ranks cover each
    element of each tensor exactly once (law 6).
    """
    whole: dict[tuple[str, str], Tensor] = {}
    covered: dict[tuple[str, str], Tensor] = {}
    for piece in (piece for rank in ranks for piece in rank):
        key, tensor, shape = (piece["kind"], piece["name"]), piece["tensor"], piece["shape"]
        if key not in whole:
            whole[key] = torch.empty(shape, dtype=tensor.dtype)
            covered[key] = torch.zeros(shape, dtype=torch.int32)
        if list(whole[key].shape) != shape or whole[key].dtype != tensor.dtype:
            raise LawBroken(f"{key}: ranks disagree on its shape or dtype")
        part_of(whole[key], piece).copy_(tensor)
        part_of(covered[key], piece).add_(1)
    for (kind, name), count in covered.items():
        if not bool((count == 1).all()):
            raise LawBroken(
                f"the pieces of {kind} {name!r} cover {int((count == 0).sum())} elements never and "
                f"{int((count > 1).sum())} more than once"
            )
    return {
        kind: {name: tensor for (of, name), tensor in whole.items() if of == kind} for kind in KINDS
    }


def part_of(whole: Tensor, piece: dict[str, Any]) -> Tensor:
    region = piece["region"]
    if region is None:
        return whole
    if piece["is_box"]:
        for dim, (offset, size) in enumerate(zip(region["offsets"], region["sizes"], strict=True)):
            whole = whole.narrow(dim, offset, size)
        return whole
    return whole.view(-1)[region["start"] : region["stop"]]


def read_all(reader: Reader) -> State:
    """Return everything that a checkpoint holds. Raises `LawBroken` when it cannot be read."""
    try:
        return {
            kind: {name: reader.read(kind, name) for name in reader.names(kind)} for kind in KINDS
        }
    except CheckpointError as error:
        raise LawBroken(f"a checkpoint of this driver cannot be read: {error}") from error

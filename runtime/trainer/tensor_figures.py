"""Figures by which tensors of two runs are compared: a digest of the bits, the sum, and the norm.

Those of a whole tensor are made of those of its parts, so that they do not depend on how ranks hold
it.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernel.contract import World

__all__ = ["PartFigures", "TensorFigures", "added", "joined", "packed", "sum_of_bits", "unpacked"]

_ENTRY = struct.Struct("<Iff")
_WRAP = 1 << 32
_WORD_BYTES = 4
_MOST = 3e38
_CHUNK_ON_HOST = 1 << 16
"""Words that stay in a processor's cache while they are hashed."""
_CHUNK = 1 << 24
"""Words hashed at once on other devices, which bounds the memory for it."""


class TensorFigures(NamedTuple):
    """Figures of one tensor."""

    bits: int
    """Sum of hashes of its 32-bit words, modulo 2**32."""
    total: float
    """Sum of its elements."""
    norm: float
    """L2 norm."""


class PartFigures:
    """Figures of the parts of tensors that one rank counts. They stay on the device until they are
    read."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._columns: tuple[list[Tensor], ...] = ([], [], [])

    def add(self, name: str, part: Tensor) -> None:
        """Start to compute the figures of a part; waits for nothing."""
        self.names.append(name)
        for column, figure in zip(self._columns, _figures(part.detach()), strict=True):
            column.append(figure)

    def stacked(self, world: World) -> Tensor:
        """Return the columns one after the other, as one vector on the device."""
        figures = [world.widened(figure) for column in self._columns for figure in column]
        device = next((each.device for each in figures if each.device.type != "cpu"), None)
        figures = [each if device is None else each.to(device) for each in figures]
        return torch.stack(figures) if figures else torch.zeros(0)


def _figures(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    words = raw.view(torch.int32) if len(raw) % _WORD_BYTES == 0 else raw.int()
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    return _sum_of_hashes(words), wide.sum(), torch.linalg.vector_norm(wide)


def _sum_of_hashes(words: Tensor) -> Tensor:
    """Return the sum of the hash of each word, modulo 2**32; int32, 0-d.

    In a plain sum, flips of one bit in several words cancel each other if as many are set as are
    cleared. The hash is `x * (2 * x + 1)`, as in RC6, of a word whose halves are mixed.
    """
    total = words.new_zeros(())
    for chunk in torch.split(words, _CHUNK_ON_HOST if words.is_cpu else _CHUNK):
        mixed = (chunk >> 16).bitwise_xor_(chunk)
        total += torch.addcmul(mixed, mixed, mixed, value=2).sum(dtype=torch.int32)
    return total


def joined(everyones: Iterable[tuple[Sequence[str], Sequence[float]]]) -> dict[str, TensorFigures]:
    """Return the figures of whole tensors, of the names and the columns of all ranks."""
    parts: dict[str, list[TensorFigures]] = {}
    for names, columns in everyones:
        count = len(names)
        for index, name in enumerate(names):
            bits, total, norm = columns[index::count]
            parts.setdefault(name, []).append(TensorFigures(int(bits), total, norm))
    return {name: added(each) for name, each in sorted(parts.items())}


def added(parts: Iterable[TensorFigures]) -> TensorFigures:
    """Return the figures of a tensor that consists of these parts."""
    bits, totals, norms = zip(*parts, strict=True)
    return TensorFigures(sum(bits) % _WRAP, math.fsum(totals), math.hypot(*norms))


def sum_of_bits(names: Sequence[str], columns: Sequence[Any]) -> int:
    """Return the sum of the digests of all parts of one rank."""
    return sum(map(int, columns[: len(names)])) % _WRAP


def packed(figures: Iterable[TensorFigures]) -> str:
    """Return figures as text: for each, its bits and two numbers of 32 bits, in base64."""
    return base64.b64encode(b"".join(_ENTRY.pack(*map(_narrow, each)) for each in figures)).decode()


def unpacked(text: str) -> list[TensorFigures]:
    """Return the figures that `packed` made a text of. Raises `ValueError` for another text."""
    try:
        return [TensorFigures(*each) for each in _ENTRY.iter_unpack(base64.b64decode(text))]
    except struct.error as error:
        raise ValueError(f"no figures of tensors: {error}") from error


def _narrow(value: float) -> float:
    """Return a number that a float of 32 bits can hold."""
    return value if isinstance(value, int) or abs(value) < _MOST else math.copysign(math.inf, value)

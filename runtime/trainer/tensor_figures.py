"""Figures by which tensors of two runs are compared: a digest of the bits, the sum, and the norm.

Those of a whole tensor are made of those of its parts. The sum and the norm do not depend on how
ranks share it; digests are compared where they share it alike.
"""

from __future__ import annotations

import base64
import hashlib
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
_COLUMNS = 8191
"""A prime, so that rows of a matrix do not lie above each other."""


class TensorFigures(NamedTuple):
    """Figures of one tensor."""

    bits: int
    """Sum of hashes of the 32-bit words of each part, modulo 2**32."""
    total: float
    """Sum of its elements."""
    norm: float
    """L2 norm."""


class PartFigures:
    """Figures of the parts of tensors that one rank counts. They stay on the device until they are
    read."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._shapes: list[torch.Size] = []
        self._columns: tuple[list[Tensor], ...] = ([], [], [])

    def add(self, name: str, part: Tensor) -> None:
        """Start to compute the figures of a part; waits for nothing."""
        self.names.append(name)
        self._shapes.append(part.shape)
        for column, figure in zip(self._columns, _figures(part.detach()), strict=True):
            column.append(figure)

    def layout(self) -> int:
        """Return a digest of 32 bits of the names and shapes of the parts."""
        parts = zip(self.names, self._shapes, strict=True)
        text = "/".join(f"{name} {[*shape]}" for name, shape in parts)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")

    def stacked(self, world: World) -> Tensor:
        """Return the columns one after the other, as one vector on the device."""
        if not self.names:
            return torch.zeros(0)
        device = next((each.device for each in self._columns[0] if not each.is_cpu), None)
        columns = self._columns
        if device is not None:
            columns = tuple([each.to(device) for each in column] for column in columns)
        return torch.cat([world.widened(torch.stack(column)) for column in columns])


def _figures(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    words = raw.view(torch.int32) if len(raw) % _WORD_BYTES == 0 else raw.int()
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    return _sum_of_hashes(words), wide.sum(), torch.linalg.vector_norm(wide)


def _sum_of_hashes(words: Tensor) -> Tensor:
    """Return the sum of hashes of words, modulo 2**32; int32, 0-d.

    In a plain sum, flips of one bit in several words cancel each other if as many are set as are
    cleared. The hash is `x * (2 * x + 1)`, as in RC6, of a word whose halves are mixed. Words that
    lie `_COLUMNS` apart are added first: reading each once takes a third of the time of hashing it.
    """
    if len(words) > _COLUMNS:
        rest = len(words) % _COLUMNS
        whole, last = torch.split(words, [len(words) - rest, rest])
        words = whole.view(-1, _COLUMNS).sum(0, dtype=torch.int32)
        words[:rest] += last
    mixed = (words >> 16).bitwise_xor_(words)
    return mixed.addcmul_(mixed, mixed, value=2).sum(dtype=torch.int32)


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

"""Tensors as bytes in host memory."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait

import torch
from torch import Tensor

from ..kernel.shards import Piece
from .background import write_in_background

__all__ = ["HostCopies", "host_bytes", "memory", "num_bytes"]


def memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous host tensor without a copy; valid as long as the tensor
    is."""
    if not tensor.numel():
        return memoryview(b"")
    if not tensor.is_cpu or not tensor.is_contiguous():
        raise ValueError(f"needs a contiguous host tensor, not one on {tensor.device}")
    raw = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(raw).cast("B")


def host_bytes(size: int) -> Tensor:
    """Allocate host memory, uint8, also if torch's default device is another one."""
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor's data."""
    return math.prod(shape) * dtype.itemsize


class HostCopies:
    """Copies of pieces in host memory, which the next copies overwrite: the n-th piece reuses the
    memory of the previous n-th piece if it fits. The memory never shrinks below the largest share
    that was copied.
    """

    def __init__(self) -> None:
        self._places: list[Tensor] = []
        self._getting_ready: Future[None] | None = None

    @property
    def num_bytes(self) -> int:
        """Host memory held."""
        return sum(place.nbytes for place in self._places)

    def get_ready(self, sizes: Sequence[int]) -> None:
        """Begin to allocate memory for pieces of these sizes in bytes, in the background: new
        memory is slow when it is first written."""

        def make() -> None:
            for number, size in enumerate(sizes):
                self._place(number, size).zero_()

        self._getting_ready = write_in_background(make)

    def of(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Return copies of the pieces, whose tensors no longer change with those of the run."""
        if self._getting_ready is not None:
            wait([self._getting_ready])  # if memory is short, the code below raises the error
            self._getting_ready = None
        for number, piece in enumerate(pieces):
            tensor = piece.tensor.detach()
            place = self._place(number, tensor.nbytes)
            copy = place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            yield dataclasses.replace(piece, tensor=copy.copy_(tensor))

    def _place(self, number: int, num_bytes: int) -> Tensor:
        if number == len(self._places):
            self._places.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
        if self._places[number].nbytes < num_bytes:
            self._places[number] = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return self._places[number]

"""Averages of a ZeRO optimizer's masters, flat as these are, in the same parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.optimizer_entries import AVERAGE
from ...kernel.shards import Piece, Reader
from . import zero_state


class ZeroAverages:
    """Averages by the index of DeepSpeed's group; empty before the first `move`."""

    def __init__(self, zero: Any, module: nn.Module) -> None:
        self.zero, self.module = zero, module
        self._of: dict[int, Tensor] = {}

    @torch.no_grad()
    def move(self, weight: float) -> None:
        """Move each average to its master by the fraction `weight`; a new one is a copy."""
        for index, master in self._masters():
            if index in self._of:
                self._of[index].lerp_(master, weight)
            else:
                self._of[index] = master.clone()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While it is open the module's weights are the averages; it takes the memory of a copy of
        the masters."""
        kept = {index: master.clone() for index, master in self._masters()}
        self._write({**kept, **self._of})
        try:
            yield
        finally:
            self._write(kept)

    def pieces(self) -> Iterator[Piece]:
        """The pieces that this rank writes."""
        for part in zero_state.partitions(self.zero, self.module) if self._of else ():
            for piece in part.slices:
                tensor = piece.of(self._of[part.index])
                name = f"{piece.name}/{AVERAGE}"
                yield Piece("optimizer", name, tensor, piece.shape, piece.region)

    @torch.no_grad()
    def restore(self, reader: Reader) -> None:
        """Read the stored averages, after the masters; the other averages are copies of masters."""
        stored = {name for name in reader.names("optimizer") if name.endswith(f"/{AVERAGE}")}
        self._of = {}
        if not stored:
            return
        self.move(1.0)
        for part in zero_state.partitions(self.zero, self.module):
            for piece in part.slices:
                if (name := f"{piece.name}/{AVERAGE}") in stored:
                    read = reader.read("optimizer", name, piece.region)
                    piece.of(self._of[part.index]).copy_(read)

    def _masters(self) -> Iterator[tuple[int, Tensor]]:
        zero = self.zero
        partitioned = zero_state.partitions_weights(zero)
        flat = (
            zero.fp32_partitioned_groups_flat
            if partitioned
            else zero.single_partition_of_fp32_groups
        )
        for index, master in enumerate(flat):
            with zero_state.in_memory(zero, index):
                yield index, master.detach()

    def _write(self, values: dict[int, Tensor]) -> None:
        with torch.no_grad():
            for index, master in self._masters():
                master.copy_(values[index])
        zero_state.publish(self.zero)

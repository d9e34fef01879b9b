"""The parts of the state that ranks of `fsdp` hold, for a run that continues without some."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from torch import Tensor

from ...kernel.contract import Outcome
from ...kernel.shards import Piece
from ..common import model_state
from . import dtensor, sharding, step_strategy
from .engine import FsdpEngine

__all__ = ["HoldingEngine"]


class HoldingEngine(FsdpEngine):
    """The engine of `fsdp`, which shows the part of the state that its rank holds. With
    `shard_size`, other ranks hold the same part."""

    _kept: Mapping[str, Tensor] = {}  # buffers, as they were before the step
    _is_torn = False

    @functools.cached_property
    def _may_be_torn(self) -> bool:
        return step_strategy.gathers(self.stepper)

    def part(self) -> tuple[int, int] | None:
        """See `HoldsParts`."""
        size = sharding.shard_size(self.options, self.world.size)
        return None if self._is_torn else (self.world.rank % size, size)

    def begin_step(self) -> None:
        """See `HoldsParts`."""
        self._kept = model_state.copied_buffers(self.module)

    def update(self) -> Outcome:
        self._is_torn = self._may_be_torn
        outcome = super().update()
        self._is_torn = False
        return outcome

    def held(self) -> Iterator[Piece]:
        """See `HoldsParts`."""
        self.units[-1].set_reshard_after_forward(True)  # also in a forward that was abandoned
        self.ready()
        part, num_parts = self.part() or (0, 1)
        if part == 0:
            for name, buffer in self._kept.items():
                yield Piece("weights", name, buffer, tuple(buffer.shape))
            yield from self.buffers.extra.alone().pieces()
        yield from dtensor.held_pieces(self.tensors(), part, num_parts)

"""Buffers, and other state of the modules, of a model that several ranks run. Rank 0 among these
holds the model's.

A forward in training changes some of them (running statistics, counts), on each rank by the samples
that this rank has seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...kernel.shards import Piece, Reader
from ..common import model_state
from ..common.buffers import write_unseen
from ..common.extra_state import ExtraState
from .collectives import keep_for_a_while, naming_call, naming_collectives
from .peers import Peers


class Buffers:
    """The buffers of `module`. Unless `synchronised`, each rank keeps its own values and saves
    them.
    """

    def __init__(
        self, module: nn.Module, peers: Peers, device: torch.device, synchronised: bool = True
    ) -> None:
        """`device`: of this rank."""
        self.rank, self.size, self.peers = peers.rank, peers.size, peers
        self._device = device
        self.extra = ExtraState(module, device, self.rank, self.size, self._differing)
        self._module, self._synchronised = module, synchronised
        # looked up at each use, since a module may replace the tensor of a buffer
        self._places = [
            (part._buffers, name)
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]

    def take_before_forward(self, called: nn.Module) -> None:
        """Take rank 0's buffers before each forward of `called`, the wrapped module."""
        if self._synchronised and self._places and self.size > 1:
            called.register_forward_pre_hook(self._before_forward)

    def pieces(self) -> Iterator[Piece]:
        """Yield all that this rank saves: buffers, and extra state."""
        yield from model_state.buffer_pieces(self._module, self.rank)
        yield from self.own_pieces()
        yield from self.extra.pieces()

    def own_pieces(self) -> Iterator[Piece]:
        """Yield the buffers that this rank saves as its own, besides those of rank 0."""
        if not self._synchronised and self.rank > 0:
            for name, buffer in model_state.named_buffers(self._module).items():
                yield Piece("state", _own(self.rank, name), buffer, tuple(buffer.shape))

    def restore_own(self, reader: Reader) -> None:
        """Restore this rank's own buffers, if the run that saved them had as many ranks. Otherwise
        those of rank 0 stay, which have been restored already.
        """
        buffers = model_state.named_buffers(self._module)
        wanted = {_own(rank, name) for name in buffers for rank in range(1, self.size)}
        stored = {name for name in reader.names("state") if name.startswith(_OWN)}
        if not self._synchronised and self.rank > 0 and stored == wanted:
            for name, buffer in buffers.items():
                buffer.copy_(reader.read("state", _own(self.rank, name)))

    @contextmanager
    def of_rank_0(self) -> Iterator[None]:
        """Give all ranks the buffers of rank 0 within the block."""
        if not self._places or self.size == 1:
            yield
            return
        buffers = self._here()
        own = [buffer.clone() for buffer in buffers]
        self._take()
        try:
            yield
        finally:
            write_unseen(buffers, own)

    def take_for_good(self) -> None:
        """Give all ranks the buffers of rank 0 from now on."""
        if self._places and self.size > 1:
            self._take()

    def _differing(self, values: Sequence[int]) -> list[int]:
        """Return the indices at which the ranks have different numbers."""
        both = torch.tensor([[*values], [~value for value in values]], device=self._device)
        with naming_call("comparing extra state of modules", self.rank):
            dist.all_reduce(keep_for_a_while(both), dist.ReduceOp.MAX, group=self.peers.group)
        most, flipped = both.tolist()
        return [index for index, value in enumerate(most) if value != ~flipped[index]]

    def _here(self) -> list[Tensor]:
        buffers = (held[name] for held, name in self._places)
        return [buffer.detach() for buffer in buffers if buffer is not None]

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._take()

    @torch.no_grad()
    def _take(self) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._here():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        with naming_collectives("taking over the buffers of rank 0", self.rank):
            for buffers in by_dtype.values():
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                # as bytes: gloo does not know every dtype
                self._from_first(flat.view(torch.uint8))
                if self.rank > 0:
                    parts = torch.split(flat, [buffer.numel() for buffer in buffers])
                    write_unseen(
                        buffers, [p.view_as(b) for p, b in zip(parts, buffers, strict=True)]
                    )

    def _from_first(self, flat: Tensor) -> None:
        dist.broadcast(keep_for_a_while(flat), src=self.peers.first, group=self.peers.group)


_OWN = "buffers/"


def _own(rank: int, name: str) -> str:
    return f"{_OWN}{rank}/{name}"

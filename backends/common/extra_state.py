"""State of a module besides parameters and buffers, which an engine saves and restores.

See `checkpoint.extra_state` for what it is and how it is stored.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...checkpoint.extra_state import (
    EXTRA,
    digest,
    encode,
    extra_state,
    give_extra_state,
    is_left_out,
    read_extra_state,
    weight_names,
)
from ...checkpoint.optimizer_entries import copied
from ...kernel.errors import RecipeError
from ...kernel.shards import Piece, Reader

__all__ = ["ExtraState", "extra_state_kept"]

_LOG = logging.getLogger(__name__)


class ExtraState:
    """The extra state of `module`, the user's own. Create it before anything replaces parameters or
    layers. Rank 0's is saved, and of other ranks what differs from it.

    `rank` and `size`: this rank among those that hold the same layers. `differing`: called by all
    of these with as many numbers; returns the indices at which the ranks have different ones.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        rank: int = 0,
        size: int = 1,
        differing: Callable[[Sequence[int]], Collection[int]] | None = None,
    ) -> None:
        self._module, self._device, self._rank, self._size = module, device, rank, size
        self._weights, self._differing = weight_names(module), differing

    def alone(self) -> ExtraState:
        """Return the same for this rank alone, which saves all of it, and compares nothing."""
        own = copy.copy(self)
        own._rank, own._size = 0, 1
        return own

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces that this rank saves. Raises `RecipeError` for a value that no
        checkpoint can hold."""
        if is_left_out():
            return
        failed: RecipeError | None = None
        encoded = {}
        try:
            for key, value in sorted(extra_state(self._module, self._weights).items()):
                encoded[key] = encode(key, value)
        except RecipeError as error:
            failed = error
        own = self._own(encoded)  # before any error: it waits for all ranks
        if failed is not None:
            raise failed
        prefix = f"{EXTRA}.{self._rank}" if self._rank else EXTRA
        for key in encoded if self._rank == 0 else own:
            for part, tensor in encoded[key].items():
                yield Piece("state", f"{prefix}/{key}/{part}", tensor, tuple(tensor.shape))

    def _own(self, encoded: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return the keys whose values differ between ranks."""
        if self._differing is None or self._size == 1:
            return []
        keys = list(encoded)
        digests = [digest(encoded[key]) for key in keys]
        names = {key: torch.tensor(list(key.encode()), dtype=torch.uint8) for key in keys}
        # ranks with other keys have other numbers of digests
        if self._differing([digest(names), len(keys)]):
            return keys
        return [keys[index] for index in self._differing(digests)] if keys else []

    def read(self, reader: Reader) -> dict[str, Any]:
        """Read this rank's values, or else rank 0's; changes nothing. Raises `CheckpointDamaged`
        for a malformed entry."""
        return read_extra_state(reader, self._device, self._rank, self._size)

    def load(self, values: Mapping[str, Any]) -> None:
        """Give the module the values that `read` returned."""
        if left := give_extra_state(self._module, values):
            _LOG.warning(
                "the checkpoint holds %s, which the model does not accept: nothing in it has "
                "set_extra_state, or a hook of load_state_dict, for that key. It is left out",
                ", ".join(left),
            )


@contextmanager
def extra_state_kept(module: nn.Module) -> Iterator[None]:
    """Restore the module's extra state when the block ends."""
    before = copied(extra_state(module))
    try:
        yield
    finally:
        give_extra_state(module, before)

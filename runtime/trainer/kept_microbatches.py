"""Keeps the microbatches of the last steps until it is known whether the steps were applied.

Only references are kept, with the state of torch's generators before each forward. Batches are
those of the host, before they are copied to a device. Their containers are copied, so that a loss
may take entries out of a batch; a tensor that a loss writes to in place stays as written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data.nested import map_leaves, num_bytes
from ..data.random_state import device_state, set_device_state
from ..kernel.batches import Group, Groups, Microbatch, Position
from ..kernel.recipe import Batch

__all__ = ["Kept", "KeptMicrobatches", "set_torch_random_state", "torch_random_state"]

_MOST_BYTES = 1 << 30
_MOST_KEPT = 64
"""Limits of what is kept of a step, by the size of its first microbatch; tensors of data workers
each hold an open file."""


@dataclass(slots=True)
class Kept:
    """A microbatch, and the state of torch's generators before its forward."""

    part: Microbatch
    own: Batch
    """The batch, in containers of its own."""
    random: tuple[Tensor, Tensor | None] | None = None

    def batch(self) -> Batch:
        """Return the batch, in containers that may be changed."""
        return _copied(self.own)


class KeptMicrobatches:
    """`Groups` that are kept. `mark` is called when a forward begins."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self.whole, self.device = groups, device
        self._groups: dict[tuple[int, int], list[Kept]] = {}
        self._waiting: deque[Kept | None] = deque()
        self._most_samples, self._most_kept = 0, _MOST_KEPT

    def groups(self, start: Position, num_steps: int) -> Generator[Group, None, None]:
        """See `Groups`."""
        self._waiting.clear()  # fetched ahead before the loop went to another position
        whole: Any = self.whole.groups(start, num_steps)
        with closing(whole):
            for group in whole:
                kept: list[Kept] = []
                self._groups[_key(group)] = kept
                yield group._replace(microbatches=self._kept(group.microbatches, kept))

    def _kept(self, microbatches: Iterator[Microbatch], kept: list[Kept]) -> Iterator[Microbatch]:
        for part in microbatches:
            if part.num_samples > self._most_samples:  # once or twice in a run
                self._most_samples = part.num_samples
                fitting = _MOST_BYTES // max(1, num_bytes(part.batch))
                self._most_kept = min(_MOST_KEPT, fitting)
            found = None
            if len(kept) < self._most_kept:
                found = Kept(part, _copied(part.batch))
                kept.append(found)
            self._waiting.append(found)
            yield part

    def mark(self) -> None:
        """Keep the random state of the microbatch whose forward begins now."""
        found = self._waiting.popleft()
        if found is not None:
            found.random = torch_random_state(self.device)

    def ended(self, group: Group) -> None:
        """Forget the steps before this one."""
        while self._groups and next(iter(self._groups)) != _key(group):
            del self._groups[next(iter(self._groups))]

    def of(self, group: Group) -> list[Kept]:
        """Return the microbatches of a step whose forward has begun, as far as they are kept."""
        return [kept for kept in self._groups.get(_key(group), []) if kept.random is not None]


def torch_random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the state of torch's generators of the host and of `device`. Takes about a
    microsecond; Python's and NumPy's would take forty.
    """
    of_device = None if device.type == "cpu" else device_state(device)
    return torch.default_generator.get_state(), of_device


def set_torch_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    """Restore the generators to the result of `torch_random_state`."""
    of_host, of_device = state
    torch.default_generator.set_state(of_host)
    if of_device is not None:
        set_device_state(device, of_device)


def _key(group: Group) -> tuple[int, int]:
    return group.position.epoch, group.position.samples


def _copied(batch: Batch) -> Batch:
    """Return the same tensors in new containers, if those can be made."""
    if type(batch) is dict:
        return dict(batch)
    try:
        return map_leaves(lambda leaf: leaf, batch)
    except Exception:  # a container of the user's that cannot be built from its parts
        return batch

"""Copies of one tensor on several ranks, compared bit for bit by digests.

Ranks that start alike and apply the same updates hold equal copies for ever. If one rank computes a
gradient differently, copies drift apart, and no loss shows that for many steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...kernel.contract import World
from ...kernel.errors import RecipeError
from ..common.digests import as_real, digests_of
from .collectives import keep_for_a_while, naming_call

__all__ = ["Copies", "Held"]

_TOLERANCE = 1e-4
"""Largest relative difference (L2) of copies in float32. Kernels whose order of additions differs
from run to run, as on GPUs, make copies differ in their last bits."""
_MOST_NAMED = 10
_ADVICE = (
    "Every rank applies the same updates to them, so something else has written to them or taken "
    "their gradients past the driver: call the module that recipe.loss is given, not one that it "
    "wraps or one kept aside, and do not write to weights in a forward"
)


class Held(NamedTuple):
    """A part of a tensor that this rank holds."""

    name: str
    region: str
    """Name of the part of the whole tensor; ranks with equal regions hold copies."""
    tensor: Tensor | None
    """None if this rank holds nothing of the tensor."""


@dataclass(frozen=True)
class _Shared:
    """Tensors of which the same ranks hold copies."""

    ranks: tuple[int, ...]
    indices: tuple[int, ...]


class Copies:
    """Compares the copies that ranks hold. Every method is called by all ranks.

    `held()` gives the same names in the same order on all ranks. `advice`: the end of the message,
    which says what to do about copies that differ.
    """

    def __init__(self, held: Callable[[], Iterable[Held]], world: World) -> None:
        self._held, self.world, self.advice = held, world, _ADVICE
        self._home = world.sums_on or world.device
        self._shared: list[_Shared] | None = None

    def compare(self) -> None:
        """Raise `RecipeError`, on all ranks, with the names of tensors and ranks, unless all copies
        are equal but for rounding. Waits for the device. Equal copies cost one small all-reduce.
        """
        if self.world.size == 1:
            return
        held = list(self._held())
        if self._shared is None:
            self._shared = self._find_shared(held)
        if not self._shared:
            return
        digests = digests_of([each.tensor for each in held]).tolist()
        own = [
            _joined(digests[index] for index in shared.indices)
            if self.world.rank in shared.ranks
            else None
            for shared in self._shared
        ]
        differing = self._differing(own)
        if differing:
            self._refuse(held, digests, [self._shared[n] for n in differing])

    def _find_shared(self, held: Sequence[Held]) -> list[_Shared]:
        """Find out which ranks hold copies of which tensors."""
        keys = torch.tensor([_key(each) for each in held], device=self.world.device)
        everyones = self._gather(keys)
        shared: dict[tuple[int, ...], set[int]] = {}
        for index in range(len(held)):
            ranks_of: dict[int, list[int]] = {}
            for rank, row in enumerate(everyones):
                ranks_of.setdefault(row[index], []).append(rank)
            for key, ranks in ranks_of.items():
                if key and len(ranks) > 1:
                    shared.setdefault(tuple(ranks), set()).add(index)
        return [_Shared(ranks, tuple(sorted(found))) for ranks, found in sorted(shared.items())]

    def _differing(self, own: Sequence[int | None]) -> list[int]:
        """Return the indices at which two ranks have different numbers; None is no number."""
        least = -(2**63)
        high = [least if value is None else value for value in own]
        low = [least if value is None else ~value for value in own]
        both = torch.tensor([high, low], device=self.world.device)
        with naming_call("comparing copies of weights", self.world.rank):
            dist.all_reduce(keep_for_a_while(both), dist.ReduceOp.MAX)
        most, flipped = both.tolist()
        return [n for n, value in enumerate(most) if value != ~flipped[n]]

    def _refuse(
        self, held: Sequence[Held], digests: Sequence[int], shared: Sequence[_Shared]
    ) -> None:
        pairs = [(group, index) for group in shared for index in group.indices]
        rank = self.world.rank
        own = [digests[index] if rank in group.ranks else None for group, index in pairs]
        found = []
        for group, index in (pairs[n] for n in self._differing(own)[:_MOST_NAMED]):
            apart, in_tolerances = self._distance(held[index], group)
            if in_tolerances > 1.0:
                found.append((held[index].name, group.ranks, apart))
        if found:
            listed = "; ".join(
                f"{name} on ranks {', '.join(map(str, ranks[:8]))} by {apart:.2g} of its size"
                for name, ranks, apart in found
            )
            raise RecipeError(
                "copies of a weight that must be equal differ between ranks: "
                f"{listed}. {self.advice}"
            )

    def _distance(self, held: Held, shared: _Shared) -> list[float]:
        """Return the distance (L2) of the farthest copy from the mean of all copies, relative to
        the mean, and the same in tolerances.
        """
        inside = self.world.rank in shared.ranks and held.tensor is not None
        own = torch.zeros(0, dtype=torch.float64, device=self._home)
        if inside:
            assert held.tensor is not None
            own = self.world.widened(as_real(held.tensor.detach()).reshape(-1)).to(self._home)
        (size,) = self._largest([float(own.numel())])
        mean = own.clone() if inside else own.new_zeros(int(size))
        with naming_call("comparing copies of a weight", self.world.rank):
            dist.all_reduce(keep_for_a_while(mean))
        mean /= len(shared.ranks)
        distance = float((own - mean).norm() / mean.norm().clamp(min=1e-30)) if inside else 0.0
        return self._largest([distance, distance / _tolerance(held.tensor)])

    def _largest(self, values: Sequence[float]) -> list[float]:
        most = torch.tensor(values, dtype=torch.float64, device=self._home)
        with naming_call("comparing copies of weights", self.world.rank):
            dist.all_reduce(keep_for_a_while(most), dist.ReduceOp.MAX)
        return most.tolist()

    def _gather(self, own: Tensor) -> list[list[int]]:
        parts = [torch.empty_like(own) for _ in range(self.world.size)]
        with naming_call("finding the ranks that hold copies of weights", self.world.rank):
            dist.all_gather(parts, keep_for_a_while(own))
        return [part.tolist() for part in parts]


def _key(held: Held) -> int:
    """Return a number that identifies the part; 0 if this rank holds nothing."""
    if held.tensor is None or not held.tensor.numel():
        return 0
    name = f"{held.name}/{held.region}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "big") + 1


def _joined(digests: Iterable[int]) -> int:
    """Return one signed 64-bit integer for several digests, which depends on their order."""
    total = 0
    for digest in digests:
        total = (total * 6364136223846793005 + digest + 1442695040888963407) % 2**63
    return total


def _tolerance(tensor: Tensor | None) -> float:
    dtype = torch.float32 if tensor is None else tensor.dtype
    narrow = dtype in (torch.bfloat16, torch.float16)
    return 4 * torch.finfo(dtype).eps if narrow else _TOLERANCE

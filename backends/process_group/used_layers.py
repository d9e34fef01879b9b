"""Compare which layers each rank uses. Ranks that shard a model must all use the same, in order.

Gathers and reductions of sharded layers are matched by their order alone. Ranks that use different
layers receive each other's weights and gradients if sizes are equal, and wait for ever if not. So
each rank notes the layers that it uses, and the notes are compared before an update is applied.
Ranks of one machine keep their notes in shared memory, where a rank may see a difference before its
next collective.
"""

from __future__ import annotations

import itertools
import struct
import time
import zlib
from array import array
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from ...kernel.contract import World
from ...kernel.errors import RecipeError
from .shm_tally import SLOT_BYTES, SharedMemorySum

_HEAD, _NOTE = struct.Struct("<QI"), struct.Struct("<I")
_NUMBER_BYTES = 8
_HALF_BYTES = SLOT_BYTES // 2
MOST_SHOWN = (_HALF_BYTES - _HEAD.size) // _NOTE.size
"""Most notes of one turn that other ranks can see. All notes are compared."""

_WHAT_TO_DO = (
    "Ranks that share a partitioned model must all use the same layers, in the same order, in each "
    "step: where a rank does not need a layer, add zero times its output; or take "
    "--backend ddp with backend.find_unused_parameters=true"
)

_BACKWARD, _WRITE = range(2)
_NAMES = ("the backward", "a write to weights")
"""Names of the first kinds of notes."""
_WRITE_ALIKE = (
    "Where one rank writes to weights between two forwards, each rank must write the same: leave "
    "out the condition on the rank"
)

_made = itertools.count()


class Turn(NamedTuple):
    """A turn that has ended. The sums of its numbers over ranks show whether all ranks have noted
    the same. The numbers are whole, and small enough to be added up exactly.
    """

    number: int
    short: float
    squared: float


class UsedLayers:
    """This rank's notes, in turns: a turn ends when ranks compare notes. `parts`: number of groups
    of neighbouring ranks, such as pipeline stages; only ranks of one group must use the same
    layers.
    """

    def __init__(self, world: World, parts: int = 1) -> None:
        self.rank, self.size = world.rank, world.size // parts
        part, place = divmod(self.rank, self.size)
        self.ranks = range(part * self.size, (part + 1) * self.size)
        # the sum over a part is 0 if its ranks report the same; parts cannot cancel each other
        self._factor = 1 if parts == 1 else (part + 1) * (1 if place else 1 - self.size)
        self._apart = parts > 1
        most = parts * (parts + 1) * (self.size - 1) if self._apart else self.size
        self._short_bits = min(20, (53 - most.bit_length()) // 2)  # 53: where floats are whole
        self.shared_memory: SharedMemorySum | None = None
        """Shared memory in which ranks see each other's notes; None where they share none."""
        self._names = [*_NAMES]
        self._turn = next(_made) << 32
        self._notes, self._ended = array("I"), array("I")
        self._gathered: set[int] = set()
        self._inside: set[int] = set()

    def kind(self, name: str) -> int:
        """Return the number to note for a layer of that name. All ranks call this in the same
        order.
        """
        self._names.append(name)
        return len(self._names) - 1

    def watch_gathered(self, name: str, part: nn.Module, again: bool) -> None:
        """Note the forwards of a part whose weights are gathered, before they are. Only the first
        one of a turn with gradients counts, unless weights are gathered `again` each time.
        """
        kind = self.kind(repr(name) if name else "the model")

        def note(module: nn.Module, args: Any) -> None:
            if again or (torch.is_grad_enabled() and kind not in self._gathered):
                self._gathered.add(kind)
                self.note(kind)
                self.check()

        if self.size > 1:
            part.register_forward_pre_hook(note, prepend=True)

    def watch_inside(self, name: str, part: nn.Module) -> None:
        """Note that this turn uses a part, with gradients, whose weights are not gathered. Ranks
        may use it in any order and number, but all must have its gradients to add up.
        """
        kind = self.kind(repr(name))

        def note(module: nn.Module, args: Any) -> None:
            if torch.is_grad_enabled():
                self._inside.add(kind)

        if self.size > 1:
            part.register_forward_pre_hook(note, prepend=True)

    def note(self, kind: int) -> None:
        """Note that a layer is used now."""
        notes = self._notes
        notes.append(kind)
        if self.shared_memory is not None and len(notes) <= MOST_SHOWN:
            slot, start = self.shared_memory.slots[self.rank], self._start(self._turn)
            _NOTE.pack_into(slot, self._place(start, len(notes) - 1), kind)
            _HEAD.pack_into(slot, start, self._turn, len(notes))

    def backward(self, adds_up: bool = True) -> None:
        """Note the start of a backward. `adds_up`: it adds up the update's gradients over ranks."""
        if self.size > 1:
            for kind in sorted(self._inside) if adds_up else ():
                self.note(kind)
            self.note(_BACKWARD)
            self.check()

    def written(self) -> None:
        """Note that code of the user has written to weights, outside a forward."""
        if self.size > 1:
            self.note(_WRITE)

    def check(self) -> None:
        """Raise `RecipeError` if another rank has noted a different layer by now."""
        if self.shared_memory is not None and self._differs():
            time.sleep(0.01)  # not every processor shows writes in their order
            if self._differs():
                raise RecipeError(self._refusal(self._turn))

    def _differs(self) -> bool:
        assert self.shared_memory is not None
        start, mine = self._start(self._turn), self.shared_memory.slots[self.rank]
        for slot in (self.shared_memory.slots[rank] for rank in self.ranks):
            turn, count = _HEAD.unpack_from(slot, start)
            notes = slice(start + _HEAD.size, self._place(start, min(count, len(self._notes))))
            if turn == self._turn and slot[notes] != mine[notes]:
                return True
        return False

    def end_turn(self) -> Turn:
        """End the turn; return the checksum of its notes, for the comparison."""
        short = zlib.crc32(self._notes.tobytes()) & ((1 << self._short_bits) - 1)
        factor = self._factor
        ended = Turn(self._turn, float(factor * short), float(factor * short * short))
        self._turn, self._ended, self._notes = self._turn + 1, self._notes, array("I")
        self._gathered.clear()
        self._inside.clear()
        if self.shared_memory is not None:
            slot, start = self.shared_memory.slots[self.rank], self._start(self._turn)
            _NOTE.pack_into(slot, start + _NUMBER_BYTES, 0)  # first the count 0, then the new turn
            _HEAD.pack_into(slot, start, self._turn, 0)
        return ended

    def require_same(self, turn: int, shorts: float, squares: float) -> None:
        """Raise `RecipeError`, on all ranks or none, unless the sums of a turn's numbers agree."""
        same = (
            not (shorts or squares) if self._apart else self.size * int(squares) == int(shorts) ** 2
        )
        if not same:
            raise RecipeError(self._refusal(turn, ended=True))

    def compare(self) -> None:
        """Compare notes after an update's last backward, where ranks share memory. Without shared
        memory, notes are compared with the next numbers that ranks exchange anyway, before a save.
        """
        if self.shared_memory is not None:
            turn, *numbers = self.end_turn()
            self.require_same(turn, *self.shared_memory.publish(numbers)())

    def _refusal(self, turn: int, ended: bool = False) -> str:
        found = self.difference(turn, ended) or (
            f"rank {self.rank} used {', '.join(self._names[kind] for kind in self._ended)}"
        )
        return f"ranks {_explained(found, 'in one step')}"

    def difference(self, turn: int, ended: bool = False) -> str:
        """Describe where the ranks first differ; return an empty string if no difference is seen.
        `ended`: they will note nothing more in this turn.
        """
        shown = [self._shown(rank, turn) for rank in self.ranks]
        for place, noted in enumerate(zip_longest(*shown)):
            by_rank = zip(self.ranks, noted, strict=True)
            used = {rank: kind for rank, kind in by_rank if ended or kind is not None}
            if len(set(used.values())) > 1:
                before = f"after {self._names[shown[0][place - 1]]} " if place else ""
                return f"{before}{self._describe_uses(used)}"
        return ""

    def difference_now(self) -> str:
        """Describe where the ranks first differ in the turn that is under way."""
        return self.difference(self._turn)

    def _describe_uses(self, used: Mapping[int, int | None]) -> str:
        ranks: dict[int | None, list[str]] = {}
        for rank, kind in used.items():
            ranks.setdefault(kind, []).append(str(rank))
        return ", ".join(
            f"{'nothing' if kind is None else self._names[kind]} on "
            f"rank{'s' * (len(those) > 1)} {' and '.join(those)}"
            for kind, those in ranks.items()
        )

    def _shown(self, rank: int, turn: int) -> Sequence[int]:
        """Return the notes of a rank in this turn, as far as they can be seen."""
        if self.shared_memory is None:
            return ()
        slot, start = self.shared_memory.slots[rank], self._start(turn)
        found, count = _HEAD.unpack_from(slot, start)
        return struct.unpack_from(f"<{count}I", slot, start + _HEAD.size) if found == turn else ()

    def _start(self, turn: int) -> int:
        return turn % 2 * _HALF_BYTES

    def _place(self, start: int, index: int) -> int:
        return start + _HEAD.size + _NOTE.size * index


@runtime_checkable
class NotesLayers(Protocol):
    """An engine whose ranks must all use the same layers."""

    layers: UsedLayers


_followed: list[UsedLayers] = []


def follow(engine: object) -> UsedLayers | None:
    """Let `describe_difference` read this engine's notes, if it takes any, from now on; return
    them.
    """
    _followed[:] = [engine.layers] if isinstance(engine, NotesLayers) else []
    return _followed[0] if _followed else None


def describe_difference() -> str:
    """Describe that ranks use different layers, if they do in this step. The text is added to the
    reason why ranks wait or have failed.
    """
    for layers in _followed:
        if found := layers.difference_now():
            return f"Ranks {_explained(found, 'in this step')}"
    return ""


def _explained(found: str, when: str) -> str:
    """Return what ranks did differently, and what to do."""
    if _NAMES[_WRITE] in found:
        return f"wrote to weights differently before or {when}: {found}. {_WRITE_ALIKE}"
    return f"used different layers {when}: {found}. {_WHAT_TO_DO}"

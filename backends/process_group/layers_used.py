"""Which layers each rank uses: where a model is cut over ranks, all must use the same, in order.

What is gathered and added up there is matched by its order alone. Ranks that use different layers
get each other's weights and gradients where sizes are the same, and wait for ever where not. So
each rank notes what it uses, and the notes are compared before an update is applied; on one machine
they lie in memory that ranks share, where one that is to go on alone may see it before it does.
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
from .shm_tally import ROOM_BYTES, SharedMemorySum

_HEAD, _NOTE = struct.Struct("<QI"), struct.Struct("<I")
_NUMBER_BYTES = 8
_HALF_BYTES = ROOM_BYTES // 2
MOST_SHOWN = (_HALF_BYTES - _HEAD.size) // _NOTE.size
"""Notes of one turn that other ranks can see; all are compared."""

_WHAT_TO_DO = (
    "Where a model is cut over ranks, all must use the same layers, in the same order, in each "
    "step: let those that a rank has no use for add zero times their output, or take "
    "--backend ddp with backend.find_unused_parameters=true"
)


_made = itertools.count()


class Turn(NamedTuple):
    """One that has ended. The sums of its numbers over ranks tell whether all have noted the same;
    they are whole, and small enough to be added up exactly."""

    number: int
    short: float
    squared: float


class LayersUsed:
    """This rank's notes, in turns: one ends whenever ranks compare them. Where ranks are in `parts`
    of neighbours, stages of a pipeline, only those of one must use the same layers."""

    def __init__(self, world: World, parts: int = 1) -> None:
        self.rank, self.size = world.rank, world.size // parts
        part, place = divmod(self.rank, self.size)
        self.ranks = range(part * self.size, (part + 1) * self.size)
        # of a part whose ranks all tell the same the sum is 0; no two parts make up for each other
        self._factor = 1 if parts == 1 else (part + 1) * (1 if place else 1 - self.size)
        self._apart = parts > 1
        most = parts * (parts + 1) * (self.size - 1) if self._apart else self.size
        self._short_bits = min(20, (53 - most.bit_length()) // 2)  # 53: where floats are whole
        self.board: SharedMemorySum | None = None
        """Where ranks see each other's notes; None where they cannot."""
        self._names = ["the backward"]
        self._turn = next(_made) << 32
        self._notes, self._ended = array("I"), array("I")
        self._gathered: set[int] = set()
        self._inside: set[int] = set()

    def kind(self, name: str) -> int:
        """A number to note for what has that name; all ranks ask for the same, in one order."""
        self._names.append(name)
        return len(self._names) - 1

    def watch_gathered(self, name: str, part: nn.Module, again: bool) -> None:
        """Note each forward of a part, before its weights are gathered for it; only the first of a
        turn, and none without gradients, unless they are gathered `again` each time."""
        kind = self.kind(repr(name) if name else "the model")

        def note(module: nn.Module, args: Any) -> None:
            if again or (torch.is_grad_enabled() and kind not in self._gathered):
                self._gathered.add(kind)
                self.note(kind)
                self.look()

        if self.size > 1:
            part.register_forward_pre_hook(note, prepend=True)

    def watch_inside(self, name: str, part: nn.Module) -> None:
        """Note that a part is used which nothing is gathered for: how often, and in which order, is
        each rank's own matter; not so whether it has gradients to add up."""
        kind = self.kind(repr(name))

        def note(module: nn.Module, args: Any) -> None:
            if torch.is_grad_enabled():
                self._inside.add(kind)

        if self.size > 1:
            part.register_forward_pre_hook(note, prepend=True)

    def note(self, kind: int) -> None:
        """It is used now."""
        notes = self._notes
        notes.append(kind)
        if self.board is not None and len(notes) <= MOST_SHOWN:
            room, start = self.board.rooms[self.rank], self._start(self._turn)
            _NOTE.pack_into(room, self._place(start, len(notes) - 1), kind)
            _HEAD.pack_into(room, start, self._turn, len(notes))

    def backward(self, adds_up: bool = True) -> None:
        """A backward begins; `adds_up`: it adds up over ranks what this update has gathered."""
        if self.size > 1:
            for kind in sorted(self._inside) if adds_up else ():
                self.note(kind)
            self.note(0)
            self.look()

    def look(self) -> None:
        """Whether another rank has noted something else by now: raises `RecipeError` then."""
        if self.board is not None and self._differs():
            time.sleep(0.01)  # not every processor shows writes in their order
            if self._differs():
                raise RecipeError(self._refusal(self._turn))

    def _differs(self) -> bool:
        assert self.board is not None
        start, mine = self._start(self._turn), self.board.rooms[self.rank]
        for room in (self.board.rooms[rank] for rank in self.ranks):
            turn, count = _HEAD.unpack_from(room, start)
            notes = slice(start + _HEAD.size, self._place(start, min(count, len(self._notes))))
            if turn == self._turn and room[notes] != mine[notes]:
                return True
        return False

    def end_turn(self) -> Turn:
        """What was noted in it is to be compared."""
        short = zlib.crc32(self._notes.tobytes()) & ((1 << self._short_bits) - 1)
        factor = self._factor
        ended = Turn(self._turn, float(factor * short), float(factor * short * short))
        self._turn, self._ended, self._notes = self._turn + 1, self._notes, array("I")
        self._gathered.clear()
        self._inside.clear()
        if self.board is not None:
            room, start = self.board.rooms[self.rank], self._start(self._turn)
            _NOTE.pack_into(room, start + _NUMBER_BYTES, 0)  # empty first, then new
            _HEAD.pack_into(room, start, self._turn, 0)
        return ended

    def require_same(self, turn: int, shorts: float, squares: float) -> None:
        """From the sums of that turn's numbers. Raises `RecipeError`, on all ranks or none."""
        same = (
            not (shorts or squares) if self._apart else self.size * int(squares) == int(shorts) ** 2
        )
        if not same:
            raise RecipeError(self._refusal(turn, ended=True))

    def compare(self) -> None:
        """After an update's last backward, where ranks share memory. Elsewhere that waits for the
        next numbers that they tell each other anyway, which is before a save."""
        if self.board is not None:
            turn, *numbers = self.end_turn()
            self.require_same(turn, *self.board.show(numbers)())

    def _refusal(self, turn: int, ended: bool = False) -> str:
        found = self.difference(turn, ended) or (
            f"rank {self.rank} used {', '.join(self._names[kind] for kind in self._ended)}"
        )
        return f"ranks used different layers in one step: {found}. {_WHAT_TO_DO}"

    def difference(self, turn: int, ended: bool = False) -> str:
        """Where ranks part first, in words; nothing where that is not seen. `ended`: they will note
        nothing more in that turn."""
        shown = [self._shown(rank, turn) for rank in self.ranks]
        for place, noted in enumerate(zip_longest(*shown)):
            told = zip(self.ranks, noted, strict=True)
            used = {rank: kind for rank, kind in told if ended or kind is not None}
            if len(set(used.values())) > 1:
                before = f"after {self._names[shown[0][place - 1]]} " if place else ""
                return f"{before}{self._who_used_what(used)}"
        return ""

    def difference_now(self) -> str:
        """The same, in the turn that is under way."""
        return self.difference(self._turn)

    def _who_used_what(self, used: Mapping[int, int | None]) -> str:
        ranks: dict[int | None, list[str]] = {}
        for rank, kind in used.items():
            ranks.setdefault(kind, []).append(str(rank))
        return ", ".join(
            f"{'nothing' if kind is None else self._names[kind]} on "
            f"rank{'s' * (len(those) > 1)} {' and '.join(those)}"
            for kind, those in ranks.items()
        )

    def _shown(self, rank: int, turn: int) -> Sequence[int]:
        """What a rank has noted in that turn, as far as it can be seen."""
        if self.board is None:
            return ()
        room, start = self.board.rooms[rank], self._start(turn)
        told, count = _HEAD.unpack_from(room, start)
        return struct.unpack_from(f"<{count}I", room, start + _HEAD.size) if told == turn else ()

    def _start(self, turn: int) -> int:
        return turn % 2 * _HALF_BYTES

    def _place(self, start: int, index: int) -> int:
        return start + _HEAD.size + _NOTE.size * index


@runtime_checkable
class NotesLayers(Protocol):
    """An engine whose ranks must all use the same layers."""

    layers: LayersUsed


_followed: list[LayersUsed] = []


def follow(engine: object) -> LayersUsed | None:
    """The notes of that engine, if it takes any, are those that `told` looks at from here on."""
    _followed[:] = [engine.layers] if isinstance(engine, NotesLayers) else []
    return _followed[0] if _followed else None


def told() -> str:
    """That ranks use different layers, if they do in this step, for whatever else is said of why
    they stand still or have failed."""
    for layers in _followed:
        if found := layers.difference_now():
            return f"Ranks use different layers in this step: {found}. {_WHAT_TO_DO}"
    return ""

"""The operations of a step one after the other, with the memory that is in use after each."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = ["Message", "Operation", "Summary", "Trace", "added_part", "with_more_blocks"]

Number = TypeVar("Number", int, Tensor)


class Operation(NamedTuple):
    """An operation of a step."""

    phase: str
    is_last: bool
    """True in the last microbatch of an update, and in the update itself."""
    dtype: torch.dtype
    flops: int
    num_bytes: int
    """Bytes that are read and written; none if the result is a view."""
    new_bytes: int = 0
    """Bytes of the result's memory, unless it is an argument's."""

    def without_amounts(self) -> Operation:
        """Return what is the same for other sizes."""
        return self._replace(flops=0, num_bytes=0, new_bytes=0)

    def extended(self, other: Operation, count: int) -> Operation:
        """Return the operation after `count` of the steps that lead from this one to the other."""
        return self._replace(
            flops=_extended(self.flops, other.flops, count),
            num_bytes=_extended(self.num_bytes, other.num_bytes, count),
            new_bytes=_extended(self.new_bytes, other.new_bytes, count),
        )


class Message(NamedTuple):
    """A collective of a step."""

    phase: str
    is_last: bool
    name: str
    """The operator's name without its namespace, such as `all_reduce`."""
    num_bytes: int
    """Bytes of the whole: of all parts that are gathered or scattered."""
    ranks: tuple[int, ...]
    overlaps: bool
    """True if forward and backward continue meanwhile, as with sums of gradients."""

    def without_amounts(self) -> Message:
        """Return what is the same for other sizes."""
        return self._replace(num_bytes=0)

    def extended(self, other: Message, count: int) -> Message:
        """Return the message after `count` of the steps that lead from this one to the other."""
        return self._replace(num_bytes=_extended(self.num_bytes, other.num_bytes, count))


class Summary(NamedTuple):
    """The memory of a step at its fullest moment, by kind, and its work in order."""

    bytes: Mapping[str, int]
    work: Sequence[Operation | Message]


@dataclass(frozen=True)
class Trace:
    """A step. Item `i` of each field belongs to the same moment."""

    names: list[tuple[str, str]]
    """Phase, and name of the operator."""
    work: list[Operation | Message | None]
    """The operator's work, if it is counted."""
    kinds: Sequence[str]
    live: Tensor
    """Bytes after the operator, by kind (see `kinds`): (moments, kinds), int64."""

    def summary(self) -> Summary:
        """Return the fullest moment, and the work."""
        return _summary(self.kinds, self.live, self.work)

    def parts(self) -> Iterator[Trace]:
        """Yield forward, backward and update in turn."""
        end = 0
        for _, names in groupby(self.names, key=lambda name: name[0]):
            begin, end = end, end + len([*names])
            yield self._slice(begin, end)

    def labels(self) -> list[Hashable]:
        """Return what is the same at moments that correspond to each other."""
        return [
            (name, None if work is None else work.without_amounts())
            for name, work in zip(self.names, self.work, strict=True)
        ]

    def _slice(self, begin: int, end: int) -> Trace:
        part = slice(begin, end)
        return Trace(self.names[part], self.work[part], self.kinds, self.live[part])


def with_more_blocks(shorter: Trace, longer: Trace, count: int) -> Summary | None:
    """Return the step of a model with `count` more equal blocks than that of `shorter`; the model
    of `longer` has one more. None if the two steps do not differ by one block alone.

    A moment near the beginning of a phase is the same one in all three, counted from the beginning;
    one near its end, counted from the end; one in a block between others, counted both ways. Its
    memory grows by the same with each block. At the moments of the blocks that are left out it lies
    between those of the blocks beside them, so that none of them is the fullest. All this holds
    where one block after the other leaves the same behind, unlike a first one, which finds nothing
    that a block before it has still to send.
    """
    parts, others = [*shorter.parts()], [*longer.parts()]
    if len(parts) != len(others):
        return None
    live: list[Tensor] = []
    work: list[Operation | Message | None] = []
    for few, more in zip(parts, others, strict=True):
        num_added = len(more.names) - len(few.names)
        begins = _possible_begins(few.labels(), more.labels())
        if not begins:
            return None
        begin = _steadiest(begins, num_added, more.live)
        end = begin + num_added
        live.append(_extended(few.live[:end], more.live[:end], count))
        live.append(_extended(few.live[begin:], more.live[end:], count))
        same = [*more.work[:begin], *more.work[end:]]
        pairs: Any = zip(few.work, same, strict=True)
        grown = [one and one.extended(other, count) for one, other in pairs]
        work += [*grown[:begin], *more.work[begin:end] * count, *grown[begin:]]
    return _summary(shorter.kinds, torch.cat(live), work)


def added_part(shorter: Sequence[Hashable], longer: Sequence[Hashable]) -> tuple[int, int] | None:
    """Return the indices where what `longer` has more begins and ends. It is in the middle of a
    part that repeats: the items before, or after it, are the same. None without such a part."""
    begins = _possible_begins(shorter, longer)
    if not begins:
        return None
    begin = _middle(begins)
    return begin, begin + len(longer) - len(shorter)


def _possible_begins(shorter: Sequence[Hashable], longer: Sequence[Hashable]) -> range:
    """Return the indices where what `longer` has more can begin."""
    num_added = len(longer) - len(shorter)
    if num_added < 0:
        return range(0)
    before = _num_equal(shorter, longer)
    after = _num_equal(shorter[::-1], longer[::-1])
    return range(len(shorter) - after, before - num_added + 1)


def _middle(begins: range) -> int:
    return begins[(len(begins) - 1) // 2]


def _steadiest(begins: range, num_added: int, live: Tensor) -> int:
    """Return the begin of the part during which memory is most often larger by the same than in the
    part before it; of several, the one nearest to the middle. `live`: of the longer step.
    """
    first, last = begins[0], begins[-1]
    middle = _middle(begins)
    if num_added == 0:
        return middle
    moments = live[first : last + 2 * num_added]
    grown = moments[num_added:] - moments[:-num_added]
    changes = torch.zeros(len(grown), dtype=torch.int64)
    changes[1:] = (grown[1:] != grown[:-1]).any(dim=1).cumsum(0)
    within = changes[num_added - 1 :] - changes[: len(begins)]
    steady = (within == within.min()).nonzero().flatten() + first
    return int(steady[(steady - middle).abs().argmin()])


def _num_equal(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Return the number of items that are equal, from the first on."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _extended(one: Number, other: Number, count: int) -> Number:
    """Return the value after `count` of the steps that lead from one to the other."""
    return one + count * (other - one)


def _summary(
    kinds: Sequence[str], live: Tensor, work: Sequence[Operation | Message | None]
) -> Summary:
    fullest = live[live.sum(dim=1).argmax()]
    num_bytes = {kind: value for kind, value in zip(kinds, fullest.tolist(), strict=True) if value}
    return Summary(num_bytes, [each for each in work if each is not None])

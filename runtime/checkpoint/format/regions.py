"""The geometry of tensor pieces: whole tensors, boxes and flat ranges become boxes.

A flat range of an N-dimensional tensor is at most 2N - 1 boxes, each of them contiguous in the
range. So reading any region out of any other is only ever a box out of a box.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations
from random import Random
from typing import Any

from ...kernel.shards import Box, Flat, Region

__all__ = [
    "boxes",
    "check",
    "from_json",
    "intersect",
    "is_whole",
    "result_shape",
    "tile",
    "to_json",
]

Shape = tuple[int, ...]
_PRIME = (1 << 61) - 1
_LOOKED_AT = 300
"""Maximum number of parts among which two overlapping ones are searched, by comparing each pair."""


def check(region: Region | None, shape: Shape) -> None:
    """Raises `ValueError` unless the region lies in a tensor of that shape."""
    if isinstance(region, Flat):
        sound = 0 <= region.start <= region.stop <= math.prod(shape)
    elif isinstance(region, Box):
        sound = len(region.offsets) == len(region.sizes) == len(shape) and all(
            min(offset, size) >= 0 and offset + size <= dim
            for offset, size, dim in zip(region.offsets, region.sizes, shape, strict=True)
        )
    else:
        sound = True
    if not sound:
        raise ValueError(f"{region} is not within a tensor of shape {shape}")


def result_shape(region: Region | None, shape: Shape) -> Shape:
    """Return the shape of a region."""
    if isinstance(region, Flat):
        return (region.stop - region.start,)
    return region.sizes if isinstance(region, Box) else shape


def is_whole(region: Region | None, shape: Shape) -> bool:
    """True if the region is the whole tensor."""
    return math.prod(result_shape(region, shape)) == math.prod(shape)


def boxes(region: Region | None, shape: Shape) -> Iterator[tuple[Box, int]]:
    """Split a region into non-empty boxes, each with the number of elements before it."""
    if isinstance(region, Flat):
        before = 0
        for box in _flat_boxes(region.start, region.stop, shape):
            yield box, before
            before += math.prod(box.sizes)
    else:
        box = region or Box((0,) * len(shape), shape)
        if math.prod(box.sizes):
            yield box, 0


def _flat_boxes(start: int, stop: int, shape: Shape) -> Iterator[Box]:
    if start == stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = shape[1:]
    row_size = math.prod(inner)
    first, head = divmod(start, row_size)
    last, tail = divmod(stop, row_size)

    def part(row: int, begin: int, end: int) -> Iterator[Box]:
        for box in _flat_boxes(begin, end, inner):
            yield Box((row, *box.offsets), (1, *box.sizes))

    if first == last:
        yield from part(first, head, tail)
        return
    if head:
        yield from part(first, head, row_size)
        first += 1
    if first < last:
        yield Box((first,) + (0,) * len(inner), (last - first, *inner))
    if tail:
        yield from part(last, 0, tail)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    offsets, sizes = [], []
    for a_start, a_size, b_start, b_size in zip(
        a.offsets, a.sizes, b.offsets, b.sizes, strict=True
    ):
        start, stop = max(a_start, b_start), min(a_start + a_size, b_start + b_size)
        if start >= stop:
            return None
        offsets.append(start)
        sizes.append(stop - start)
    return Box(tuple(offsets), tuple(sizes))


def tile(parts: Iterable[Box], whole: Box) -> str:
    """Describe a gap or an overlap if the boxes `parts` do not tile the box `whole`; return '' if
    they do.

    The time is linear in the number of parts: boxes tile another box exactly if their corners, with
    alternating signs, sum up to the corners of that box. The sum is compared as a polynomial at a
    random point (https://en.wikipedia.org/wiki/Schwartz-Zippel_lemma), which fails once in 2**54
    times.
    """
    parts, at = list(parts), _RandomPoint()
    if sum(map(at.corners, parts)) % _PRIME == at.corners(whole):
        return ""
    if pair := _overlapping(sorted(parts, key=lambda box: box.offsets)[:_LOOKED_AT]):
        return f"{pair[0]} and {pair[1]} overlap"
    missing = math.prod(whole.sizes) - sum(math.prod(part.sizes) for part in parts)
    if missing > 0:
        return f"{missing} elements of {whole} are not stored"
    return f"some of its {len(parts)} parts overlap"


class _RandomPoint:
    """A random number for each coordinate of each dimension."""

    def __init__(self) -> None:
        draw = Random().randrange  # not the generator of the process
        self._numbers: defaultdict[tuple[int, int], int] = defaultdict(lambda: draw(_PRIME))

    def corners(self, box: Box) -> int:
        """Return the signed sum over all corners; each term is the product of the numbers of its
        coordinates."""
        product = 1
        for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            number = self._numbers[dim, start] - self._numbers[dim, start + size]
            product = product * number % _PRIME
        return product


def _overlapping(parts: list[Box]) -> tuple[Box, Box] | None:
    return next((pair for pair in combinations(parts, 2) if intersect(*pair)), None)


def to_json(region: Region) -> dict[str, list[Any]]:
    """Convert a region to `{"box": [offsets, sizes]}` or `{"flat": [start, stop]}`."""
    if isinstance(region, Flat):
        return {"flat": [region.start, region.stop]}
    return {"box": [list(region.offsets), list(region.sizes)]}


def from_json(value: Any) -> Region:
    """Invert `to_json`. Raises `ValueError`."""
    match value:
        case {"flat": [start, stop], **rest} if not rest and _integers([start, stop]):
            return Flat(start, stop)
        case {"box": [offsets, sizes], **rest} if not rest:
            if _integers(offsets) and _integers(sizes):
                return Box(tuple(offsets), tuple(sizes))
    raise ValueError(f"{value!r:.200} is neither a box nor a flat range")


def _integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int for number in value)

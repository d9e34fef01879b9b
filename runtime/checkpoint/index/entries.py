"""The index of a checkpoint: the files that hold each tensor, so that a reader opens only the files
that it needs.

Every file's header lists its tensors, and reading all headers is fast if there are few files. A
checkpoint of more than `FEW` parts also has an index. In the index, pieces of a tensor at equal
distances, in files at equal distances, are one *stride*: a tensor that is sharded by a rule takes a
line or two, whatever the number of ranks. Indexes of neighbouring parts are joined in a tree, `FEW`
at a time, so that no rank handles the headers of all files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

from ...kernel.errors import CheckpointDamaged
from ...kernel.shards import Box, Flat, Kind, Region, TensorInfo
from ..format import regions, strict_json
from ..format.safetensors import DTYPES, is_shape

__all__ = ["FEW", "INDEX", "Index", "Stride", "TensorEntry"]

INDEX = "index.json"
FEW = 8
_MOST_PIECES = 64
"""Maximum number of pieces of one tensor in a file: a search through as many runs of as many pieces
would take too long.
"""
_FORMAT = "drivetrain-index"
_VERSION = 1
_CODES = {dtype: code for code, dtype in DTYPES.items()}

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stride:
    """Pieces of one tensor, in order of their parts."""

    part: int
    """The part of the first piece."""
    region: Region
    """The region of the first piece."""
    count: int = 1
    every: int = 0
    """Parts from one piece to the next."""
    by: Numbers = ()
    """The distance from one piece to the next: in each dimension, or in elements."""

    def last(self) -> tuple[int, Numbers]:
        """The part and the start of the last piece."""
        offsets, _ = _extent(self.region)
        done = self.count - 1
        if done:
            offsets = tuple([o + done * by for o, by in zip(offsets, self.by, strict=True)])
        return self.part + done * self.every, offsets

    def with_next(self, other: Stride) -> Stride | None:
        """Return both strides as one, if `other` continues this one."""
        offsets, sizes = _extent(other.region)
        if type(other.region) is not type(self.region) or _extent(self.region)[1] != sizes:
            return None
        part, end = self.last()
        every, by = other.part - part, tuple([b - a for a, b in zip(end, offsets, strict=True)])
        if every < 1 or min(by, default=0) < 0 or not any(by):
            return None
        if any(run.count > 1 and (run.every, run.by) != (every, by) for run in (self, other)):
            return None
        return Stride(self.part, self.region, self.count + other.count, every, by)

    def parts(self, low: Numbers, high: Numbers) -> Iterator[int]:
        """Yield the parts that hold elements from `low` to below `high`."""
        first, stop = 0, self.count
        offsets, sizes = _extent(self.region)
        by = self.by or (0,) * len(offsets)
        for o, size, step, lo, hi in zip(offsets, sizes, by, low, high, strict=True):
            if step:
                first = max(first, (lo - size - o) // step + 1)
                stop = min(stop, -(-(hi - o) // step))
            elif not (o < hi and o + size > lo):
                return
        for number in range(first, stop):
            yield self.part + number * self.every


@dataclass
class TensorEntry:
    """A tensor's dtype, shape and pieces, known without opening its files."""

    info: TensorInfo
    runs: list[Stride] = field(default_factory=list)

    def add(self, run: Stride) -> None:
        """Add a piece; pieces are added in order of parts."""
        joined = self.runs[-1].with_next(run) if self.runs else None
        if joined is None:
            self.runs.append(run)
        else:
            self.runs[-1] = joined

    def parts(self, region: Region | None) -> list[int]:
        """Return the parts that hold, or may hold, elements of a region."""
        shape, found = self.info.shape, set[int]()
        for box, _ in regions.boxes(region, shape):
            ends = tuple(o + s for o, s in zip(box.offsets, box.sizes, strict=True))
            flat = _flat(box, shape)
            for run in self.runs:
                among = flat if isinstance(run.region, Flat) else (box.offsets, ends)
                found.update(run.parts(*among))
        return sorted(found)


class Index:
    """Entries of tensors, by kind and name."""

    def __init__(self) -> None:
        self.kinds: dict[Kind, dict[str, TensorEntry]] = {kind: {} for kind in get_args(Kind)}

    def add(self, kind: Kind, name: str, info: TensorInfo, runs: Iterable[Stride]) -> None:
        """Add the entries of a part, in order of parts. Raises `ValueError` if parts disagree about
        a tensor."""
        known = self.kinds[kind].setdefault(name, TensorEntry(info))
        if known.info != info:
            here, there = (f"{each.dtype} {each.shape}" for each in (info, known.info))
            raise ValueError(f"{kind} {name!r:.200} is {here}, and {there} elsewhere")
        for run in runs:
            known.add(run)

    def join(self, other: Index) -> None:
        """Add the index of the parts that follow."""
        for kind, tensors in other.kinds.items():
            for name, known in tensors.items():
                self.add(kind, name, known.info, known.runs)

    # --- in files -----------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Return bytes that are the same for equal indexes."""
        value: dict[str, Any] = {"format": _FORMAT, "version": _VERSION}
        for kind, tensors in self.kinds.items():
            value[kind] = {name: _known_to_json(known) for name, known in tensors.items()}
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, raw: bytes, where: str, num_files: int) -> Index:
        """Parse an index. `num_files`: number of files in the checkpoint. Raises
        `CheckpointDamaged`, naming `where` and the malformed entry."""
        value, index = strict_json.parse(raw, where), cls()
        known = {"format": _FORMAT, "version": _VERSION}
        if not isinstance(value, dict) or {key: value.pop(key, None) for key in known} != known:
            raise CheckpointDamaged(f"{where}: is no index of version {_VERSION}")
        if value.keys() != index.kinds.keys():
            raise CheckpointDamaged(f"{where}: has the keys {sorted(value)!r:.200}")
        alike: dict[
            str, TensorEntry
        ] = {}  # most layers of a model have the same entry as the layer before
        for kind, tensors in value.items():
            if not isinstance(tensors, dict):
                raise CheckpointDamaged(f"{where}: {kind!r} is {tensors!r:.200}")
            for name, item in tensors.items():
                text = repr(item)
                if text not in alike:
                    try:
                        alike[text] = _known_from_json(item, num_files)
                    except (TypeError, ValueError) as error:
                        raise CheckpointDamaged(
                            f"{where}: {kind} {name!r:.200}: {error}"
                        ) from error
                index.kinds[kind][name] = TensorEntry(alike[text].info, [*alike[text].runs])
        return index


def _extent(region: Region) -> tuple[Numbers, Numbers]:
    """Return start and size of a region: in each dimension, or in elements."""
    if isinstance(region, Flat):
        return (region.start,), (region.stop - region.start,)
    return region.offsets, region.sizes


def _flat(box: Box, shape: Numbers) -> tuple[Numbers, Numbers]:
    """Return the flat range from the first to the last element of a box, in row-major order."""
    first = last = 0
    for offset, size, dim in zip(box.offsets, box.sizes, shape, strict=True):
        first, last = first * dim + offset, last * dim + offset + size - 1
    return (first,), (last + 1,)


def _known_to_json(known: TensorEntry) -> dict[str, Any]:
    return {
        "dtype": _CODES[known.info.dtype],
        "shape": known.info.shape,
        "runs": [_run_to_json(run) for run in known.runs],
    }


def _run_to_json(run: Stride) -> dict[str, Any]:
    more = {"count": run.count, "every": run.every, "by": run.by} if run.count > 1 else {}
    return {"part": run.part, **regions.to_json(run.region), **more}


def _known_from_json(item: Any, num_files: int) -> TensorEntry:
    match item:
        case {"dtype": str(code), "shape": dims, "runs": list(runs), **rest}:
            if not rest and code in DTYPES and is_shape(dims):
                shape = tuple(dims)
                info = TensorInfo(DTYPES[code], shape)
                known = TensorEntry(info, [_run_from_json(run, shape, num_files) for run in runs])
                if sum(run.count for run in known.runs) <= _MOST_PIECES * num_files:
                    return known
    raise ValueError(f"cannot be {item!r:.200}")


def _run_from_json(item: Any, shape: Numbers, num_files: int) -> Stride:
    match item:
        case {"part": part, "count": count, "every": every, "by": [*by], **rest}:
            run = Stride(part, regions.from_json(rest), count, every, tuple(by))
        case {"part": part, **rest}:
            run = Stride(part, regions.from_json(rest))
        case _:
            raise ValueError(f"a run is {item!r:.200}")
    numbers = (run.part, run.count, run.every, *run.by)
    sound = all(type(n) is int and n >= 0 for n in numbers) and 1 <= run.count <= num_files
    if not sound or (run.count > 1 and not (run.every and any(run.by))):
        raise ValueError(f"a run is {item!r:.200}, of {num_files} files")
    _, offsets = run.last()
    sizes = _extent(run.region)[1]
    flat = isinstance(run.region, Flat)
    regions.check(run.region, shape)
    regions.check(Flat(offsets[0], offsets[0] + sizes[0]) if flat else Box(offsets, sizes), shape)
    return run

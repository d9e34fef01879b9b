"""Fakes: ranks that are threads of this process, an engine that is a list of pieces, and random
partitions.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from drivetrain.checkpoint import CheckpointReader, CheckpointStore
from drivetrain.checkpoint.format.safetensors import DTYPES
from drivetrain.kernel.contract import World
from drivetrain.kernel.shards import Box, Flat, Piece, Region


class Meeting:
    """Meeting point where the ranks of one fake run exchange values."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.values: list[Any] = [None] * size


class FakeSession:
    """The part of a session that saving and loading use."""

    def __init__(self, rank: int = 0, size: int = 1, meeting: Meeting | None = None) -> None:
        self.world = World(rank, size, torch.device("cpu"), rank, size)
        self.meeting = meeting or Meeting(size)
        self.rng = {"torch": torch.full((16,), rank, dtype=torch.uint8)}

    def exchange(self, value: Any) -> list[Any]:
        self.meeting.values[self.world.rank] = value
        self.meeting.barrier.wait()
        values = list(self.meeting.values)
        self.meeting.barrier.wait()
        return values

    def rng_state(self) -> dict[str, Tensor]:
        return dict(self.rng)

    def set_rng_state(self, state: Mapping[str, Tensor]) -> None:
        self.rng = dict(state)


class FakeEngine:
    def __init__(self, pieces: list[Piece], tied: tuple[tuple[str, ...], ...] = ()) -> None:
        self.pieces, self.tied = pieces, tied

    def shards(self) -> Iterator[Piece]:
        yield from self.pieces


def on_ranks(size: int, work: Callable[[FakeSession], Any]) -> list[Any]:
    """Call `work` on each rank, in a thread of its own. Return results, or the exceptions raised,
    in rank order.
    """
    meeting = Meeting(size)
    results: list[Any] = [None] * size

    def body(rank: int) -> None:
        try:
            results[rank] = work(FakeSession(rank, size, meeting))
        except BaseException as error:
            results[rank] = error
            if not isinstance(error, Exception):
                meeting.barrier.abort()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def save(
    store: CheckpointStore, step: int, ranks: list[list[Piece]], state: Any = None, **more: Any
) -> Path:
    """Save once, on as many ranks as there are lists; raise the error of rank 0."""
    results = on_ranks(
        len(ranks),
        lambda session: store.save(
            step, FakeEngine(ranks[session.world.rank]), session, state or {"step": step}, **more
        ),
    )
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results[0]


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Return a value that is equal for equal tensors only, NaNs and signs of zero included."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.tolist())


def region_of(tensor: Tensor, region: Region | None) -> Tensor:
    """Return the region of a tensor: the reference for what reading the region must return."""
    if isinstance(region, Flat):
        return tensor.reshape(-1)[region.start : region.stop]
    if isinstance(region, Box):
        for dim, (offset, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def piece(name: str, tensor: Tensor, region: Region | None = None, kind: Any = "weights") -> Piece:
    return Piece(kind, name, region_of(tensor, region), tuple(tensor.shape), region)


def contents(folder: Path) -> dict[str, Any]:
    """Return everything in a checkpoint, in a form that can be compared."""
    reader = CheckpointReader(folder)
    assert reader.verify() == []
    return {
        f"{kind}:{name}": bits(reader.read(kind, name))
        for kind in ("weights", "optimizer", "state")
        for name in reader.names(kind)
    } | {"state": reader.manifest.state, "step": reader.manifest.step}


def run_of(value: float, size: int = 2) -> list[list[Piece]]:
    """Return the pieces of a small model on each rank: one tensor whole, one partitioned by rows,
    one flat.
    """
    whole, rows, flat = (torch.full((n, 3), value) for n in (2, 2 * size, 5))
    edges = [15 * rank // size for rank in range(size + 1)]
    ranks = [
        [
            piece("rows", rows, Box((2 * rank, 0), (2, 3))),
            piece("rows/moment", rows * 2, Box((2 * rank, 0), (2, 3)), "optimizer"),
            piece("flat", flat, Flat(edges[rank], edges[rank + 1])),
        ]
        for rank in range(size)
    ]
    ranks[0].append(piece("whole", whole))
    return ranks


# --- random tensors and their tilings ---------------------------------------------------------

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
dtypes = st.sampled_from(sorted(DTYPES.values(), key=str))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype, shape = draw(dtypes), draw(shapes)
    count = math.prod(shape) * dtype.itemsize
    top = 1 if dtype == torch.bool else 255
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    raw = torch.randint(0, top + 1, (count,), generator=generator).to(torch.uint8)
    return raw.view(dtype).view(shape)


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region | None:
    """Draw a region of a tensor of that shape, possibly empty."""
    match draw(st.sampled_from(["whole", "box", "flat"])):
        case "box":
            offsets = [draw(st.integers(0, size)) for size in shape]
            sizes = [
                draw(st.integers(0, size - offset))
                for size, offset in zip(shape, offsets, strict=True)
            ]
            return Box(tuple(offsets), tuple(sizes))
        case "flat":
            start = draw(st.integers(0, math.prod(shape)))
            return Flat(start, draw(st.integers(start, math.prod(shape))))
    return None


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region | None]:
    """Draw regions that tile a tensor of that shape: flat ranges, or boxes split again
    and again.
    """
    if draw(st.booleans()):
        count = math.prod(shape)
        inner = draw(st.lists(st.integers(0, count), max_size=3))
        edges = sorted({0, *inner, count})
        return [Flat(a, b) for a, b in itertools.pairwise(edges)] or [Flat(0, 0)]
    parts = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 3)) if shape else 0):
        box = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.sizes[dim]))
        for start, size in ((0, at), (at, box.sizes[dim] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim] += start
            sizes[dim] = size
            parts.append(Box(tuple(offsets), tuple(sizes)))
    return list(parts)

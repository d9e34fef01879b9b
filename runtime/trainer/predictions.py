"""Prediction: the model's outputs for each sample, from all feeders, in the order of the data.

Outputs of a few groups are kept on the device, then joined, copied to the host and gathered as one
chunk. Each row is sent with the index of its sample, so the order is the order of the data, however
the data were partitioned. Rows of idle microbatches and of repeated samples are left out (law 5).
Prediction changes no state of training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernel.batches import Group
from ..kernel.contract import Engine, Session
from ..kernel.errors import RecipeError
from ..kernel.evaluate import evaluation_mode
from ..kernel.recipe import Batch
from .outputs import join, leaves, rebuild

__all__ = ["Chunk", "gather_predictions"]


@dataclass(frozen=True)
class Chunk:
    """Outputs of consecutive samples, one row each, on the host."""

    first: int
    """The index of the first sample in the data."""
    num_samples: int
    outputs: Any
    """Nested as the model returned them; mappings are dicts."""


def gather_predictions(
    session: Session,
    engine: Engine,
    forward: Callable[[nn.Module, Batch], Any],
    groups: Iterable[Group],
    *,
    groups_in_chunk: int = 16,
    padding: float = -100,
    ranks: Collection[int] | None = None,
    receive: Callable[[Chunk], None] | None = None,
) -> Any:
    """Return the outputs of `forward(module, batch)` for every sample of `groups`; called by all
    ranks.

    `forward` returns a tensor, or mappings, lists and tuples of tensors, each with the samples of
    the batch as its first dimension; where sizes of the second differ, shorter rows are filled up
    with `padding`. `groups`: of data that are not shuffled. After each `groups_in_chunk` of them
    outputs are moved to the host, which bounds the device's memory. `ranks`: the ranks that get the
    outputs, by default all; the others hold no more than a chunk. With `receive`, these ranks get
    each chunk in order and nothing is kept; without it they get everything as one structure. Other
    ranks get None.

    Runs under `no_grad`; to predict only, call it under `torch.inference_mode()`, under which small
    models take less time.

    Raises `RecipeError` when `forward` returns something else, or another structure than before.
    """
    wanted = ranks is None or session.world.rank in ranks
    kept: list[Chunk] = []
    chunks = _chunks(session, engine, forward, groups, groups_in_chunk, padding)
    with closing(chunks):
        for chunk in chunks:
            if wanted:
                (receive or kept.append)(chunk)
    return _join_chunks(kept, padding) if kept else None


class _Part(NamedTuple):
    """The place of a microbatch in the data, kept until its outputs are gathered."""

    offset: int
    num_samples: int
    repeats: int
    ends_group: bool


def _chunks(
    session: Session,
    engine: Engine,
    forward: Callable[[nn.Module, Batch], Any],
    groups: Iterable[Group],
    groups_in_chunk: int,
    padding: float,
) -> Generator[Chunk, None, None]:
    parts: deque[_Part] = deque()
    pending, num_groups = _Pending(padding), 0
    with evaluation_mode(session, engine.module), torch.no_grad():
        for batch in session.feed(_batches(groups, parts)):
            with engine.autocast():
                outputs = forward(engine.module, batch)
            part = parts.popleft()
            pending.add(outputs, part)
            num_groups += part.ends_group
            if part.ends_group and num_groups % groups_in_chunk == 0:
                yield pending.gather(session)
                pending = _Pending(padding)
        if pending.parts:
            yield pending.gather(session)


def _batches(groups: Iterable[Group], parts: deque[_Part]) -> Iterator[Batch]:
    for group in groups:
        for number, each in enumerate(group.microbatches, 1):
            ends_group = number == group.num_microbatches
            parts.append(_Part(each.offset, each.num_samples, each.repeats, ends_group))
            yield each.batch


@dataclass
class _Pending:
    """This feeder's outputs since the last chunk, on the device."""

    padding: float
    structure: Any = None
    tensors: dict[str, list[Tensor]] = field(default_factory=dict)
    parts: list[_Part] = field(default_factory=list)

    def add(self, outputs: Any, part: _Part) -> None:
        found = leaves(outputs, part.num_samples * part.repeats or None)
        if not self.parts:
            self.structure, self.tensors = outputs, {path: [] for path in found}
        if found.keys() != self.tensors.keys():
            raise RecipeError(
                f"the outputs are {', '.join(found)}, those of the batch before were "
                f"{', '.join(self.tensors)}; every batch must give the same"
            )
        for path, tensor in found.items():
            self.tensors[path].append(tensor)
        self.parts.append(part)

    def gather(self, session: Session) -> Chunk:
        """Gather the outputs of all readers, by sample; called by all ranks."""
        mine = {path: self._on_host(tensors) for path, tensors in self.tensors.items()}
        widths = _widths(session, mine)
        own = slice(None) if session.world.is_first_of_reader else slice(0)
        indices = session.gather(_indices(self.parts)[own])
        in_order = bool((indices.diff() > 0).all())
        order = slice(None) if in_order else indices.argsort()
        gathered = [
            session.gather(join([tensor], self.padding, widths[path])[own])[order]
            for path, tensor in mine.items()
        ]
        return Chunk(int(indices.min()), len(indices), rebuild(self.structure, gathered))

    def _on_host(self, tensors: list[Tensor]) -> Tensor:
        """Return the rows that count. They are selected on the host, where no new shape is
        compiled."""
        counted = zip(map(Tensor.cpu, tensors), self.parts, strict=True)
        rows = [
            # a view costs as much as a small copy
            host if host.shape[0] == part.num_samples else host[: part.num_samples]
            for host, part in counted
        ]
        return join(rows, self.padding)


def _indices(parts: Sequence[_Part]) -> Tensor:
    """Return the indices of the samples in these parts, most of which are consecutive."""
    runs: list[list[int]] = []
    for part in parts:
        if not runs or runs[-1][1] != part.offset:
            runs.append([part.offset, part.offset])
        runs[-1][1] += part.num_samples
    return torch.cat([torch.arange(start, stop) for start, stop in runs])


def _widths(session: Session, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the largest second dimension over all ranks, by path; 0 for outputs without one."""
    shapes = session.exchange({path: list(tensor.shape[1:]) for path, tensor in tensors.items()})
    if len({str([(path, shape[1:]) for path, shape in each.items()]) for each in shapes}) > 1:
        raise RecipeError(
            f"the outputs differ between ranks in more than the second dimension: {shapes}"
        )
    return {path: max(sum(each[path][:1]) for each in shapes) for path in tensors}


def _join_chunks(chunks: list[Chunk], padding: float) -> Any:
    by_chunk = [list(leaves(chunk.outputs).values()) for chunk in chunks]
    joined = [join(parts, padding) for parts in zip(*by_chunk, strict=True)]
    return rebuild(chunks[0].outputs, joined)

"""Digests of a step that is logged: of its samples, its random state, and the weights after it.

By these `drivetrain replay` and `drivetrain compare` find where two runs part. A digest of a whole
tensor is the sum of the digests of its parts, so that it does not depend on how ranks hold it.
"""

from __future__ import annotations

import base64
import hashlib
import math
import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..checkpoint.extra_state import without_extra_state
from ..data.sample_digest import num_parts, part_digests, part_text
from ..kernel.batches import Group, Groups, Microbatch, Position
from ..kernel.contract import Session, World
from ..kernel.events import Event
from ..kernel.loop import TrainLoop

__all__ = ["Digester", "ReceivesSamples", "StepDigests", "TensorFigures", "packed", "unpacked"]

_MOST_LOSSES = 100
_MOST_ENTRIES = 20_000
"""Tensors times ranks up to which each tensor is recorded; above, all together are."""
ALL_WEIGHTS = "all weights"
_ENTRY = struct.Struct("<Iff")
_WRAP = 1 << 32
_WORD_BYTES = 4
_MOST = 3e38


class TensorFigures(NamedTuple):
    """Figures of one tensor."""

    bits: int
    """Sum of its 32-bit words, modulo 2**32."""
    total: float
    """Sum of its elements."""
    norm: float
    """L2 norm."""


@dataclass(frozen=True)
class StepDigests(Event):
    """Digests of the last step before a log; an event, equal on every rank."""

    step: int
    losses: Sequence[float]
    """The loss of each step since the last log, the last `_MOST_LOSSES` at most."""
    epoch: int
    first_sample: int
    samples: int
    """Number of samples of the global batch; 0 if its samples were not looked at."""
    batch: str
    """Five digits for each part of the global batch, see `sample_digest`."""
    random: str
    """Digest of the random state of all ranks."""
    weights: str
    """Figures of each weight after the step, see `packed`."""
    names: Sequence[str]
    """Names of the weights, in the first such event of a start only."""
    ranks: str
    """Eight digits for each of several ranks: the sum of the words of the weights it saves."""


@runtime_checkable
class ReceivesSamples(Protocol):
    """An observer that receives a description of the samples of each step that is logged."""

    def receive_samples(self, step: int, samples: str) -> None:
        """Receive it before the step is trained."""


@dataclass
class _Batch:
    """Digests of this rank's microbatches of one global batch."""

    position: Position
    num_samples: int
    parts: list[int]


class Digester:
    """Makes the digests of one rank. All ranks call every method in the same order.

    `level`: the setting `digests`. `due(step)`: whether a step is logged, which is known before its
    samples are fetched. `where`: describes the samples of a group, for
    those of the `observers` that receive it.
    """

    def __init__(
        self,
        level: str,
        session: Session,
        due: Callable[[int], bool],
        where: Callable[[Position, int], str],
        observers: Sequence[object] = (),
    ) -> None:
        self._session, self._due, self._level, self._where = session, due, level, where
        self._receivers = [each for each in observers if isinstance(each, ReceivesSamples)]
        self._batches: dict[int, _Batch] = {}
        self._losses: list[Tensor] = []
        self._names: Sequence[str] = ()

    def watched(self, groups: Groups, steps_done: Callable[[], int]) -> Groups:
        """Return the same groups; samples of steps that are logged are looked at on the way."""
        return groups if self._level == "none" else _Watched(self, groups, steps_done)

    def restart(self) -> None:
        """Forget the steps since the last log."""
        self._batches.clear()
        self._losses.clear()

    def add(self, loss: Tensor) -> None:
        """Add a step's loss, without waiting for the device."""
        if self._level != "none":
            self._losses.append(loss)
            del self._losses[:-_MOST_LOSSES]

    def look(self, step: int, group: Group) -> Group:
        """Return the group of a step, whose microbatches are looked at when they are taken."""
        if not self._due(step):
            return group
        seen = _Batch(group.position, group.num_samples, [0] * num_parts(group.num_samples))
        self._batches[step] = seen
        for receiver in self._receivers:
            receiver.receive_samples(step, self._where(group.position, group.num_samples))
        return group._replace(microbatches=self._look(group.microbatches, seen))

    def _look(self, microbatches: Iterator[Microbatch], seen: _Batch) -> Iterator[Microbatch]:
        counts = self._session.world.is_first_of_reader
        for part in microbatches:
            if part.num_samples and counts:
                start = part.offset - seen.position.samples
                sums = part_digests(
                    part.batch, part.num_samples, start, seen.num_samples, part.repeats
                )
                seen.parts = [a + b for a, b in zip(seen.parts, sums, strict=True)]
            yield part

    def begin(self, loop: TrainLoop) -> Callable[[], StepDigests | None]:
        """Start to compute on the device; the returned function waits for it, and for all ranks."""
        if self._level == "none":
            return lambda: None
        world = self._session.world
        names, figures = _figures_of(loop, world) if self._level == "weights" else ([], None)
        losses, self._losses = self._losses, []
        loss = torch.stack([world.widened(each) for each in losses]) if losses else torch.zeros(0)
        progress = loop.progress
        batch = self._batches.pop(progress.step, None)
        self._batches = {step: b for step, b in self._batches.items() if step > progress.step}
        random = self._random()

        def finish() -> StepDigests:
            own = [] if figures is None else figures.tolist()
            count = len(names)
            columns = [own[:count], own[count : 2 * count], own[2 * count :]]
            everyones = self._session.exchange(
                [
                    self._session.world.feeder_index,
                    loss.tolist(),
                    [] if batch is None else batch.parts,
                    random,
                    names,
                    columns,
                ]
            )
            return self._joined(progress.step, batch, everyones)

        return finish

    def _random(self) -> int:
        """Return a digest of the state of torch's generators."""
        state = hashlib.blake2b(str(self._session.world.rank).encode(), digest_size=5)
        on_host = self._session.world.device.type == "cpu"  # the whole state takes much longer
        found = {"torch": torch.get_rng_state()} if on_host else self._session.rng_state()
        for name in sorted(found.keys() & {"torch", "device"}):
            state.update(name.encode())
            state.update(found[name].cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return int.from_bytes(state.digest(), "big")

    def _joined(self, step: int, batch: _Batch | None, everyones: Sequence[Any]) -> StepDigests:
        by_feeder = {feeder: losses for feeder, losses, *_ in everyones}
        losses = [sum(each) / len(by_feeder) for each in zip(*by_feeder.values(), strict=True)]
        parts = [sum(each) for each in zip(*(rank[2] for rank in everyones), strict=False)]
        random = sum(rank[3] for rank in everyones) % (1 << 40)
        weights = _joined_figures(rank[4:6] for rank in everyones)
        sums = [sum(map(int, rank[5][0])) % _WRAP for rank in everyones if len(everyones) > 1]
        if len(everyones) * len(weights) > _MOST_ENTRIES:
            weights = {ALL_WEIGHTS: _sum_of(weights.values())}
        news = () if list(weights) == list(self._names) else tuple(weights)
        self._names = tuple(weights)
        position = Position() if batch is None else batch.position
        return StepDigests(
            step=step,
            losses=losses,
            epoch=position.epoch,
            first_sample=position.samples,
            samples=0 if batch is None else batch.num_samples,
            batch=part_text(parts),
            random=f"{random:010x}",
            weights=packed(list(weights.values())),
            names=news,
            ranks="".join(f"{each:08x}" for each in sums),
        )


class _Watched:
    """`Groups` whose microbatches a `Digester` looks at."""

    def __init__(self, digester: Digester, groups: Groups, steps_done: Callable[[], int]) -> None:
        self._digester, self._groups, self._steps_done = digester, groups, steps_done

    def groups(self, start: Position, num_steps: int) -> Generator[Group, None, None]:
        """See `Groups`."""
        first = self._steps_done() + 1
        whole: Any = self._groups.groups(start, num_steps)
        with closing(whole):
            for step, group in enumerate(whole, first):
                yield self._digester.look(step, group)


@torch.no_grad()
def _figures_of(loop: TrainLoop, world: World) -> tuple[list[str], Tensor]:
    """Return the names of the weights of which this rank writes a part, and as one vector the sums
    of their words, of their elements, and their norms; waits for nothing."""
    names: list[str] = []
    columns: tuple[list[Tensor], ...] = ([], [], [])
    with without_extra_state():
        for piece in loop.engine.shards():
            if piece.kind == "weights" and piece.tensor.numel():
                names.append(piece.name)
                for column, figure in zip(columns, _figures(piece.tensor.detach()), strict=True):
                    column.append(figure)
    figures = [world.widened(figure) for column in columns for figure in column]
    device = next((each.device for each in figures if each.device.type != "cpu"), None)
    figures = [each if device is None else each.to(device) for each in figures]
    return names, torch.stack(figures) if figures else torch.zeros(0)


def _figures(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    words = raw.view(torch.int32) if len(raw) % _WORD_BYTES == 0 else raw
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    return words.sum(dtype=torch.int32), wide.sum(), torch.linalg.vector_norm(wide)


def _joined_figures(everyones: Iterable[Sequence[Any]]) -> dict[str, TensorFigures]:
    """Return the figures of whole tensors, in the order of the ranks that have parts of them."""
    parts: dict[str, list[TensorFigures]] = {}
    for names, columns in everyones:
        for name, bits, total, norm in zip(names, *columns, strict=True):
            parts.setdefault(name, []).append(TensorFigures(int(bits), total, norm))
    return {name: _sum_of(each) for name, each in sorted(parts.items())}


def _sum_of(parts: Iterable[TensorFigures]) -> TensorFigures:
    bits, totals, norms = zip(*parts, strict=True)
    return TensorFigures(sum(bits) % _WRAP, math.fsum(totals), math.hypot(*norms))


def packed(figures: Iterable[TensorFigures]) -> str:
    """Return figures as text: for each, its bits and two numbers of 32 bits, in base64."""
    return base64.b64encode(b"".join(_ENTRY.pack(*map(_narrow, each)) for each in figures)).decode()


def unpacked(text: str) -> list[TensorFigures]:
    """Return the figures that `packed` made a text of. Raises `ValueError` for another text."""
    try:
        return [TensorFigures(*each) for each in _ENTRY.iter_unpack(base64.b64decode(text))]
    except struct.error as error:
        raise ValueError(f"no figures of tensors: {error}") from error


def _narrow(value: float) -> float:
    """Return a number that a float of 32 bits can hold."""
    return value if isinstance(value, int) or abs(value) < _MOST else math.copysign(math.inf, value)

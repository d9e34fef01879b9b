"""Digests of a logged step: of its samples, its random state, its gradients, and the weights after
it. By these `drivetrain replay` and `drivetrain compare` find where two runs part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..checkpoint.extra_state import without_extra_state
from ..data.sample_digest import num_parts, part_digests, part_text
from ..kernel.batches import Group, Groups, Microbatch, Position
from ..kernel.contract import Session
from ..kernel.events import Event
from ..kernel.loop import TrainLoop
from ..kernel.plan import Capabilities
from .gradient_digests import GradientDigests
from .tensor_figures import PartFigures, TensorFigures, added, joined, packed, sum_of_bits

__all__ = ["Digester", "ReceivesSamples", "StepDigests"]

_MOST_LOSSES = 100
_MOST_ENTRIES = 20_000
"""Tensors times ranks up to which each tensor is recorded; above, all together are."""


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
    gradients: str
    """Figures of each gradient, averaged over ranks and not clipped; empty if the driver shows
    none."""
    gradient_names: Sequence[str]
    """Names of the parameters that these are of, where they are others than in the event before."""
    ranks: str
    """Eight digits for each of several ranks: the digest of the weights it saves."""
    layout: str
    """Digest of how ranks share the weights. Digests of tensors are equal where this is."""


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

    `level`: the setting `digests`. `able`: of the driver; weights and gradients are left out where
    reading them is costly. `shows`: shows the engine's updates, if it can. `due(step)`: whether a
    step is logged, which is known before its samples are fetched. `where`: describes the samples of
    a group, for those of the `observers` that receive it.
    """

    def __init__(
        self,
        level: str,
        able: Capabilities,
        session: Session,
        shows: object,
        due: Callable[[int], bool],
        where: Callable[[Position, int], str],
        observers: Sequence[object] = (),
    ) -> None:
        self._reads_weights = level == "weights" and not able.costly_reads
        self._gradients = GradientDigests(shows, session) if self._reads_weights else None
        self._session, self._due, self._level, self._where = session, due, level, where
        self._receivers = [each for each in observers if isinstance(each, ReceivesSamples)]
        self._batches: dict[int, _Batch] = {}
        self._losses: list[Tensor] = []
        self._has_step = False
        self._names: dict[str, Sequence[str]] = {}
        """By the kind of tensors, the names in the last event."""

    def watched(self, groups: Groups, steps_done: Callable[[], int]) -> Groups:
        """Return the same groups; samples of steps that are logged are looked at on the way."""
        return groups if self._level == "none" else _Watched(self, groups, steps_done)

    def restart(self) -> None:
        """Forget the steps since the last log."""
        self._batches.clear()
        self._losses.clear()
        self._has_step = False

    def add(self, loss: Tensor) -> None:
        """Add a step's loss, without waiting for the device."""
        self._has_step = True
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

    def before_update(self, step: int) -> None:
        """Watch the update of a step that is logged. Called by all ranks."""
        if self._gradients is not None and self._due(step):
            self._gradients.watch()

    def begin(self, loop: TrainLoop) -> Callable[[], StepDigests | None]:
        """Start to compute on the device; the returned function waits for it, and for all ranks. It
        returns None if there was no step since the restart: its gradients are gone."""
        if self._level == "none" or not self._has_step:
            return lambda: None
        world = self._session.world
        weights = _weights_of(loop) if self._reads_weights else PartFigures()
        gradients = PartFigures() if self._gradients is None else self._gradients.take()
        figures = [(each.names, each.stacked(world)) for each in (weights, gradients)]
        losses, self._losses = self._losses, []
        loss = torch.stack([world.widened(each) for each in losses]) if losses else torch.zeros(0)
        progress = loop.progress
        batch = self._batches.pop(progress.step, None)
        self._batches = {step: b for step, b in self._batches.items() if step > progress.step}
        random = self._random()

        def finish() -> StepDigests:
            everyones = self._session.exchange(
                [
                    self._session.world.feeder_index,
                    loss.tolist(),
                    [] if batch is None else batch.parts,
                    random,
                    *([names, columns.tolist()] for names, columns in figures),
                    weights.layout(),
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
        sums = [sum_of_bits(*rank[4]) for rank in everyones if len(everyones) > 1]
        weights, gradients = (
            _fewer(joined(rank[entry] for rank in everyones), len(everyones), name)
            for entry, name in ((4, "all weights"), (5, "all gradients"))
        )
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
            names=self._news("weights", weights),
            gradients=packed(list(gradients.values())),
            gradient_names=self._news("gradients", gradients),
            ranks="".join(f"{each:08x}" for each in sums),
            layout=_layout(rank[6] for rank in everyones),
        )

    def _news(self, kind: str, found: Mapping[str, TensorFigures]) -> Sequence[str]:
        """Return the names if they are others than in the event before."""
        before, self._names[kind] = self._names.get(kind, ()), tuple(found)
        return () if before == self._names[kind] else self._names[kind]


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
def _weights_of(loop: TrainLoop) -> PartFigures:
    """Return the figures of the parts of weights that this rank writes; waits for nothing."""
    found = PartFigures()
    with without_extra_state():
        for piece in loop.engine.shards():
            if piece.kind == "weights" and piece.tensor.numel():
                found.add(piece.name, piece.tensor)
    return found


def _layout(of_ranks: Iterable[int]) -> str:
    text = ",".join(map(str, of_ranks))
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _fewer(
    figures: dict[str, TensorFigures], num_ranks: int, name: str
) -> dict[str, TensorFigures]:
    """Return the figures; if there are too many to record, those of all tensors together, by
    `name`."""
    too_many = len(figures) * num_ranks > _MOST_ENTRIES
    return {name: added(figures.values())} if too_many else figures

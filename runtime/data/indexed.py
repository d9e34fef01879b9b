"""Splits the order of samples into steps, and fetches a reader's part of each step.

A *group* is the global batch of one step: the next G samples of the epoch's order. It is
partitioned over the readers in contiguous parts of nearly equal size. Each part is split into
microbatches, the same number on every reader, since ranks that run different numbers of forwards
would deadlock. The parts of all readers, one after the other, are in the order of the epoch. So
which samples train together does not depend on the number of readers, accumulation, workers, or
where a run resumed. G may grow at the beginning of a run: see `batch_sizes.py`.

Randomness in the data (augmentation, masking) is exact on resume in one of two ways. Without
workers, a data set draws from the process's own generators, which a checkpoint holds. With workers,
or with `isolate_random=True`, Python's, torch's and NumPy's global generators are seeded for each
sample from (seed, epoch, offset), and for `collate` from the first offset of its microbatch: a
sample is then the same on any world size and for any microbatch size.

The loop takes steps from a `Source`. `Loader` is the source for data that can be indexed;
`stream.py` has the source for data that can only be read from the front, `prebatched.py` the source
for batches that the user's own loader makes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain, islice, takewhile, tee
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, default_collate

from ..kernel.batches import Group, Microbatch, Position
from ..kernel.errors import DataError
from .batch_sizes import BatchSizes
from .begun_epoch import BegunEpoch, PresentSamples
from .left_out import count_rows
from .loader_settings import LoaderSettings
from .order import Order, OrderFunction, ReadAhead, sequential, shuffled
from .partition import Part, named_samples, steps_per_epoch
from .workers import Fetcher, MicrobatchRequest, from_workers

__all__ = [
    "Loader",
    "NativeOrderSource",
    "is_indexed",
    "length_of",
    "steps_per_epoch",
    "through_epochs",
]

FEWEST_LEFT = 1000
"""An epoch can be finished if at least one in this many of its samples still exists. Finding them
takes up to this many times longer."""


class NativeOrderSource:
    """A base of sources whose data come in their own order: an epoch is one pass over the data."""

    epoch_length: int | None
    drop_last: bool
    sizes: BatchSizes
    """The number by which `Position.samples` grows in each step."""

    def begun(self, position: Position) -> dict[str, Any]:
        """See `Source`."""
        return {}

    def resume(self, position: Position, begun: Mapping[str, Any]) -> None:
        """See `Source`."""

    def describe_continuation(self, position: Position) -> str:
        """See `Source`."""
        return (
            f"epoch {position.epoch} continues after the first {position.samples} samples that the "
            "data give now, in their own order: if that order has changed, some samples come twice "
            "in this epoch, and some not at all"
        )

    def length_at(self, position: Position) -> int | None:
        """See `Source`."""
        return self.epoch_length

    def steps_left(self, position: Position, part: float = 1.0) -> int | None:
        """See `Source`."""
        length, taken = self.epoch_length, position.samples
        if length is None:
            return None
        before, left = position.epoch * length, max(0, length - taken)
        return self.sizes.steps_left(before, length, taken, left, self.drop_last, part)

    def steps_in(self, first: int, epochs: float) -> int | None:
        """See `Source`."""
        if self.epoch_length is None:
            return None
        return self.sizes.steps_in(first, epochs, self.epoch_length, self.drop_last)


@dataclass(eq=False, repr=False)
class Loader(LoaderSettings):
    """The groups of a map-style data set, from any position on, as one reader sees them.

    Raises `DataError` for data, and `SettingError` for numbers, that cannot be trained with.
    """

    dataset: Any
    """`__len__` and `__getitem__`; or `__getitems__(indices)`, used unless samples are isolated."""
    _: KW_ONLY
    order: OrderFunction = shuffled
    """The function that gives the order of an epoch, and its length."""
    isolate_random: bool | None = None
    """See the top of this file; None isolates with workers only. False with workers seeds each
    microbatch instead of each sample: still exact on resume, but then augmentation depends on the
    size of microbatches."""
    num_samples: int = field(init=False)
    epoch_length: int = field(init=False)
    steps_per_epoch: int = field(init=False)
    _begun: BegunEpoch | None = field(init=False, default=None)
    """The order of an epoch that another run began."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_samples = _count_samples(self.dataset)
        self.epoch_length = len(self._open(epoch=0))
        self.steps_per_epoch = steps_per_epoch(self.epoch_length, self.global_batch, self.drop_last)

    def begun(self, position: Position) -> dict[str, Any]:
        """See `Source`."""
        if not position.samples:
            return {}
        begun = self._begun_with(position.epoch)
        return begun.later(position.samples, self._order(position.epoch)).to_json()

    def resume(self, position: Position, begun: Mapping[str, Any]) -> None:
        """See `Source`."""
        self._begun = None
        if begun and position.samples:
            found = BegunEpoch.from_json(position.epoch, position.samples, begun)
            _check_enough_are_left(found, self.num_samples)
            self._begun = found

    def describe_continuation(self, position: Position) -> str:
        """See `Source`."""
        then, now = self._begun_with(position.epoch).length, self.num_samples
        gone = ", without those that are gone" if now < then else ""
        new = f"; the new ones come from epoch {position.epoch + 1} on" if now > then else ""
        return (
            f"epoch {position.epoch} is finished in the order of the {then} samples that it was "
            f"begun with{gone}{new}"
        )

    def length_at(self, position: Position) -> int:
        """See `Source`."""
        begun = self._begun
        return begun.length if begun and begun.epoch == position.epoch else self.epoch_length

    def steps_left(self, position: Position, part: float = 1.0) -> int:
        """See `Source`."""
        order, taken = self._open(position.epoch), position.samples
        before, left = position.epoch * self.epoch_length, order.count(taken)
        if taken + left < len(order) and before + taken < self.sizes.grown_at:
            # samples are missing, and sizes depend on places: count groups one by one
            limit = self.sizes.limit(len(order), self.drop_last, part)
            for steps, (at, size) in enumerate(self._spans(order, position)):
                if not size or at >= limit:
                    return steps
                if before + at >= self.sizes.grown_at:
                    return steps + self.steps_left(Position(position.epoch, at), part)
        return self.sizes.steps_left(before, len(order), taken, left, self.drop_last, part)

    def steps_in(self, first: int, epochs: float) -> int:
        """See `Source`."""
        return self.sizes.steps_in(first, epochs, self.epoch_length, self.drop_last)

    def groups(self, start: Position, num_steps: int) -> Generator[Group, None, None]:
        """See `Source`."""
        steps, steps_ahead = tee(islice(self._steps(start), num_steps))
        requests = (request for step in steps_ahead for request in step.requests())
        with closing(self._fetch(requests)) as fetched:
            received = map(self.times.add, fetched)
            for step in steps:
                microbatches = islice(received, len(step.parts))
                group = Group(*step[:3], len(step.parts), microbatches)
                yield count_rows(group) if self.counts_rows else group
                if next(microbatches, None) is not None:
                    raise RuntimeError("take all microbatches of a group before the next group")

    def where(self, position: Position, num_samples: int) -> str:
        """See `Source`."""
        order = self._open(position.epoch)
        indices = ", ".join(map(str, order.read(position.samples, 0, num_samples)))
        return f"{named_samples(position, num_samples)} ({indices})"

    def _fetch(self, requests: Iterator[MicrobatchRequest]) -> Generator[Microbatch, None, None]:
        isolate = self.workers > 0 if self.isolate_random is None else self.isolate_random
        fetcher = Fetcher(self.dataset, self.collate or default_collate, self.seed, isolate)
        if self.workers:
            return from_workers(fetcher, requests, self.workers, self.prefetch, self.start_method)
        return (fetcher(request) for request in requests)

    def _steps(self, start: Position) -> Iterator[_Step]:
        """Yield the plan of each step, endlessly."""
        epoch, offset = start.epoch, start.samples
        while True:
            order = self._open(epoch)
            if offset > len(order):
                raise DataError(
                    f"{offset} samples of epoch {epoch} were consumed, it has {len(order)}"
                )
            spans = self._spans(order, Position(epoch, offset))
            offset, size = next(spans)
            position = Position(epoch, offset)
            for stop, next_size in spans:
                if not size:
                    break
                after = Position(epoch, stop) if next_size else Position(epoch + 1)
                yield _Step(position, after, size, self.parts(size), order)
                position, size = after, next_size
            epoch, offset = epoch + 1, 0

    def _spans(self, order: ReadAhead, start: Position) -> Iterator[tuple[int, int]]:
        """Yield the place and the size of each group of an epoch from `start` on, then (0, 0)."""
        size = self.global_batch
        if start.epoch * self.epoch_length + start.samples < self.sizes.grown_at:
            return self._growing_spans(order, start.epoch, start.samples)
        spans = order.spans(start.samples, size)
        if self.drop_last:
            spans = takewhile(lambda span: span[1] == size, spans)
        return chain(spans, ((0, 0),))

    def _growing_spans(self, order: ReadAhead, epoch: int, start: int) -> Iterator[tuple[int, int]]:
        """Yield the same from a place where the size of groups still grows."""
        before = epoch * self.epoch_length
        start, left = next(order.spans(start, 1), (start, 0))
        while left and before + start < self.sizes.grown_at:
            size = self.sizes.at(before + start)
            (_, found), *following = islice(order.spans(start, size), 2)
            if self.drop_last and found < size:
                left = 0
            else:
                yield start, found
                start, left = following[0] if following else (start, 0)
        yield from self._spans(order, Position(epoch, start)) if left else ((0, 0),)

    def _begun_with(self, epoch: int) -> BegunEpoch:
        if self._begun is not None and self._begun.epoch == epoch:
            return self._begun
        is_shuffled = self.order is not sequential
        return BegunEpoch(epoch, 0, self.num_samples, self.seed, is_shuffled)

    def _order(self, epoch: int) -> Order:
        if self._begun is not None and self._begun.epoch == epoch:
            return self._begun.order(self.order)
        return self.order(self.num_samples, self.seed, epoch)

    def _open(self, epoch: int) -> ReadAhead:
        order = self._order(epoch)
        begun = self._begun_with(epoch)
        if begun.length > self.num_samples:
            return PresentSamples(order, self.num_samples)
        if len(order) == 0:
            raise DataError(f"the order of epoch {epoch} holds no samples")
        if self.drop_last and len(order) < self.global_batch and begun.start == 0:
            raise DataError(
                f"an epoch of {len(order)} samples holds no full global batch of "
                f"{self.global_batch}: lower the batch or keep the last one (drop_last=False)"
            )
        return ReadAhead(order)


class _Step(NamedTuple):
    position: Position
    next: Position
    num_samples: int
    parts: tuple[Part, ...]
    order: ReadAhead

    def requests(self) -> Iterator[MicrobatchRequest]:
        epoch, base = self.position.epoch, self.position.samples
        for start, stop, num_samples, repeats in self.parts:
            indices = self.order.read(base, start, stop)
            yield MicrobatchRequest(epoch, base + start, indices, num_samples, repeats)


def through_epochs(
    start: Position, num_epochs: int | None, read: Callable[[Position], Iterator[Group]]
) -> Iterator[Group]:
    """Yield the groups of all epochs from `start` on; `read` reads one epoch. `num_epochs` None:
    endlessly.

    Ends at a later epoch without groups, whose data can be read only once. Raises `DataError` if
    the first epoch has none.
    """
    position = start
    while num_epochs is None or position.epoch < num_epochs:
        group = None
        for group in read(position):
            yield group
        if group is None and not position.samples:
            if position.epoch == 0:
                raise DataError("the data holds no samples, or none that fill a global batch")
            return
        position = Position(position.epoch + 1)


def is_indexed(dataset: Any) -> bool:
    """True if samples can be fetched by index, so that an epoch can be read from anywhere."""
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return indexed and not isinstance(dataset, IterableDataset)


def length_of(data: Any) -> int | None:
    """Return `len(data)`, or None if it has no length. Raises `DataError` for an invalid length."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None
    except (ValueError, OverflowError) as error:
        raise DataError(f"the length of {type(data).__name__} is invalid: {error}") from error


def _check_enough_are_left(begun: BegunEpoch, num_samples: int) -> None:
    if begun.length > FEWEST_LEFT * num_samples:
        raise DataError(
            f"epoch {begun.epoch} was begun with {begun.length} samples, and there are "
            f"{num_samples}: these are other data. Pass the data that was trained on, or use only "
            "the weights of the checkpoint"
        )


def _count_samples(dataset: Any) -> int:
    if not is_indexed(dataset):
        raise DataError(
            f"{type(dataset).__name__} has no length or cannot be indexed: a map-style data set "
            "(__len__ and __getitem__) is needed here"
        )
    length = length_of(dataset)
    if length is None:
        raise DataError(f"the length of {type(dataset).__name__} is no whole number")
    if length == 0:
        raise DataError(f"{type(dataset).__name__} holds no samples")
    return length

"""Cuts the order of samples into steps, and fetches a reader's part of each step.

A *group* is the global batch of one step: the next G samples of the epoch's order. It is dealt to
the readers in contiguous parts of nearly equal size, and each part is cut into microbatches, as
many on every reader, since ranks that run different numbers of forwards wait for each other for
ever. Read one after the other, the parts are in the order of the epoch: which samples train
together depends neither on the number of readers, nor on accumulation, workers, or where a run
resumed.

Randomness in the data (augmentation, masking) is exact on resume in one of two ways. Without
workers, a data set draws from the process's own generators, which a checkpoint holds. With workers,
or with `isolate_random=True`, Python's, torch's and NumPy's global generators are seeded for each
sample from (seed, epoch, offset), and for `collate` from the first offset of its microbatch: a
sample is then the same on any world size and for any microbatch size.

The loop takes steps from a `Source`. `Loader` here is one over data that can be indexed;
`stream.py` has one over data that can only be read from the front, `prebatched.py` one over batches
that a loader of the user's makes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain, islice, tee
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, default_collate

from ..kernel.batches import Group, Microbatch, Position
from ..kernel.errors import DataError, SettingError
from ..kernel.recipe import Batch
from .begun_epoch import Begun, Present
from .order import Order, OrderFunction, ReadAhead, sequential, shuffled
from .partition import Part, pad_by_repeating, partition, steps_left, steps_per_epoch
from .workers import Fetcher, MicrobatchRequest, from_workers

__all__ = [
    "Dealing",
    "InOwnOrder",
    "Loader",
    "is_indexed",
    "length_of",
    "steps_per_epoch",
    "through_epochs",
]

FEWEST_LEFT = 1000
"""One in so many samples that an epoch was begun with; finding them takes so many times longer."""


class InOwnOrder:
    """A source of what comes in an order of its own: an epoch is whatever that gives."""

    epoch_length: int | None
    drop_last: bool

    @property
    def _group_length(self) -> int:
        """The increase of `Position.samples` in a step."""
        raise NotImplementedError

    def begun(self, position: Position) -> dict[str, Any]:
        """See `Source`."""
        return {}

    def resume(self, position: Position, begun: Mapping[str, Any]) -> None:
        """See `Source`."""

    def going_on(self, position: Position) -> str:
        """See `Source`."""
        return (
            f"epoch {position.epoch} goes on after the first {position.samples} of what the data "
            "give now, in an order of their own: where that is another one, some come twice in "
            "this epoch, and some not at all"
        )

    def length_at(self, position: Position) -> int | None:
        """See `Source`."""
        return self.epoch_length

    def steps_left(self, position: Position, part: float = 1.0) -> int | None:
        """See `Source`."""
        length, taken = self.epoch_length, position.samples
        if length is None:
            return None
        left = max(0, length - taken)
        return steps_left(length, taken, left, self._group_length, self.drop_last, part)


@dataclass(eq=False, repr=False, kw_only=True)
class Dealing:
    """The settings by which samples are dealt to readers, cut, collated and fetched.

    Raises `SettingError` for numbers out of range.
    """

    global_batch: int
    micro_batch: int
    seed: int = 0
    collate: Callable[[list[Any]], Batch] | None = None
    """By default `torch.utils.data.default_collate`."""
    reader_index: int = 0
    num_readers: int = 1
    drop_last: bool = False
    """Leave out the last group of an epoch when it is not full."""
    fixed_size: bool = False
    """Give every microbatch exactly `micro_batch` rows, repeating samples where there are fewer."""
    workers: int = 0
    """Processes that fetch; with none, nothing is fetched ahead."""
    prefetch: int = 2
    """Microbatches that each worker keeps ready."""
    start_method: str | None = None
    """The start method of workers: fork, forkserver or spawn; None is the platform's default."""

    def __post_init__(self) -> None:
        if not 0 <= self.reader_index < self.num_readers:
            raise SettingError(f"reader_index is {self.reader_index}, of {self.num_readers}")
        if self.micro_batch < 1 or self.workers < 0 or self.prefetch < 1:
            raise SettingError(
                f"micro_batch ({self.micro_batch}) and prefetch ({self.prefetch}) must be 1 or "
                f"more, workers ({self.workers}) 0 or more"
            )
        if self.global_batch < self.num_readers:
            raise SettingError(
                f"a global batch of {self.global_batch} samples cannot be dealt to "
                f"{self.num_readers} readers: raise it, or start fewer processes"
            )

    def parts(self, num_samples: int) -> tuple[Part, ...]:
        """This reader's microbatches of a group of so many samples."""
        cut_up = pad_by_repeating if self.fixed_size else partition
        return cut_up(num_samples, self.micro_batch, self.reader_index, self.num_readers)


@dataclass(eq=False, repr=False)
class Loader(Dealing):
    """The groups of a map-style data set, from any position on, as one reader sees them.

    Raises `DataError` for data, and `SettingError` for numbers, that cannot be trained with.
    """

    dataset: Any
    """`__len__` and `__getitem__`; or `__getitems__(indices)`, used unless samples are isolated."""
    _: KW_ONLY
    order: OrderFunction = shuffled
    """Says in which order an epoch is read, and how long it is."""
    isolate_random: bool | None = None
    """See the top of this file; None is "with workers". False with workers seeds each microbatch
    instead of each sample: still exact on resume, but then augmentation depends on the cut."""
    num_samples: int = field(init=False)
    epoch_length: int = field(init=False)
    steps_per_epoch: int = field(init=False)
    _begun: Begun | None = field(init=False, default=None)
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
            found = Begun.from_json(position.epoch, position.samples, begun)
            _check_enough_are_left(found, self.num_samples)
            self._begun = found

    def going_on(self, position: Position) -> str:
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
        left = order.count(taken)
        return steps_left(len(order), taken, left, self.global_batch, self.drop_last, part)

    def groups(self, start: Position, num_steps: int) -> Generator[Group, None, None]:
        """See `Source`."""
        steps, steps_ahead = tee(islice(self._steps(start), num_steps))
        requests = (request for step in steps_ahead for request in step.requests())
        with closing(self._fetch(requests)) as fetched:
            for step in steps:
                microbatches = islice(fetched, len(step.parts))
                yield Group(
                    step.position, step.next, step.num_samples, len(step.parts), microbatches
                )
                if next(microbatches, None) is not None:
                    raise RuntimeError("take all microbatches of a group before the next group")

    def where(self, position: Position, num_samples: int) -> str:
        """See `Source`."""
        first = position.samples
        order = self._open(position.epoch)
        indices = ", ".join(map(str, order.read(first, 0, num_samples)))
        return f"samples {first} to {first + num_samples - 1} of epoch {position.epoch} ({indices})"

    def _fetch(self, requests: Iterator[MicrobatchRequest]) -> Generator[Microbatch, None, None]:
        isolate = self.workers > 0 if self.isolate_random is None else self.isolate_random
        fetcher = Fetcher(self.dataset, self.collate or default_collate, self.seed, isolate)
        if self.workers:
            return from_workers(fetcher, requests, self.workers, self.prefetch, self.start_method)
        return (fetcher(request) for request in requests)

    def _steps(self, start: Position) -> Iterator[_Step]:
        """The plan of each step, without end."""
        epoch, offset = start.epoch, start.samples
        fewest = self.global_batch if self.drop_last else 1
        while True:
            order = self._open(epoch)
            if offset > len(order):
                raise DataError(
                    f"{offset} samples of epoch {epoch} were consumed, it has {len(order)}"
                )
            spans = chain(order.spans(offset, self.global_batch), ((0, 0),))
            offset, size = next(spans)
            position = Position(epoch, offset)
            for stop, next_size in spans:
                if size < fewest:
                    break
                after = Position(epoch, stop) if next_size >= fewest else Position(epoch + 1)
                yield _Step(position, after, size, self.parts(size), order)
                position, size = after, next_size
            epoch, offset = epoch + 1, 0

    def _begun_with(self, epoch: int) -> Begun:
        if self._begun is not None and self._begun.epoch == epoch:
            return self._begun
        is_shuffled = self.order is not sequential
        return Begun(epoch, 0, self.num_samples, self.seed, is_shuffled)

    def _order(self, epoch: int) -> Order:
        if self._begun is not None and self._begun.epoch == epoch:
            return self._begun.order(self.order)
        return self.order(self.num_samples, self.seed, epoch)

    def _open(self, epoch: int) -> ReadAhead:
        order = self._order(epoch)
        begun = self._begun_with(epoch)
        if begun.length > self.num_samples:
            return Present(order, self.num_samples)
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
    """The groups of all epochs from `start` on, `read` one epoch at a time; None: without end.

    Ends where a further epoch has none: what it comes from can be read once. Raises `DataError`
    when the first one has none.
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
    """`len(data)`, or None where there is none. Raises `DataError` for one that cannot be."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None
    except (ValueError, OverflowError) as error:
        raise DataError(f"the length of {type(data).__name__} cannot be: {error}") from error


def _check_enough_are_left(begun: Begun, num_samples: int) -> None:
    if begun.length > FEWEST_LEFT * num_samples:
        raise DataError(
            f"epoch {begun.epoch} was begun with {begun.length} samples, and there are "
            f"{num_samples}: that is other data. Give the data that was trained on, or take the "
            "weights of the checkpoint alone"
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

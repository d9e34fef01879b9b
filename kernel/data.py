"""How the order of samples is cut into steps, and how a feeder's part of each step is fetched.

A *group* is the global batch of one step: the next G samples of the epoch's order. It is dealt to
the feeders in contiguous parts of nearly equal size, and each part is cut into microbatches, as
many on every feeder, since ranks that run different numbers of forwards wait for each other for
ever. Read one after the other, the parts give the order back: which samples train together
depends neither on the number of feeders, nor on accumulation, workers, or where a run resumed.

Randomness in the data (augmentation, masking) is exact on resume in one of two ways. Without
workers, a data set draws from the process's own generators, which a checkpoint holds. With
workers, or with `isolate_random=True`, Python's, torch's and NumPy's global generators are seeded
for each sample from (seed, epoch, offset), and for `collate` from the first offset of its
microbatch: a sample is then the same on any world size and for any microbatch size.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import KW_ONLY, asdict, dataclass, field
from itertools import islice, tee
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, default_collate

from .contract import Batch
from .cut import Part, cut, cut_to_size, steps_per_epoch
from .errors import DataError, SettingError
from .fetch import Fetcher, Microbatch, Request, from_workers
from .order import Order, OrderFunction, ReadAhead, sequential, shuffled

__all__ = ["Group", "Loader", "Microbatch", "Position", "eval_batches", "steps_per_epoch"]


@dataclass(frozen=True, slots=True)
class Position:
    """Where training stands in the data: `samples` of the order of `epoch` were consumed."""

    epoch: int = 0
    samples: int = 0

    def to_json(self) -> dict[str, int]:
        """For the manifest of a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Position:
        """Raises `DataError` for anything but what `to_json` returns."""
        if set(value) != {"epoch", "samples"} or any(
            type(number) is not int or number < 0 for number in value.values()
        ):
            raise DataError(f"not a data position: {dict(value)!r}")
        return cls(**value)


@dataclass(frozen=True, slots=True)
class Group:
    """One step's samples, and this feeder's part of them.

    Take all `microbatches` before asking for the next group: each is fetched when it is asked for.
    """

    position: Position
    next: Position
    """Where to start after this group."""
    num_samples: int
    """Over all feeders."""
    num_microbatches: int
    """The same on every feeder."""
    microbatches: Iterator[Microbatch]


@dataclass(eq=False, repr=False)
class Loader:
    """The groups of a map-style data set, from any position on, as one feeder sees them.

    Raises `DataError` for data, and `SettingError` for numbers, that cannot be trained with.
    """

    dataset: Any
    """`__len__` and `__getitem__`; or `__getitems__(indices)`, used unless samples are isolated."""
    _: KW_ONLY
    global_batch: int
    micro_batch: int
    seed: int = 0
    collate: Callable[[list[Any]], Batch] | None = None
    """By default `torch.utils.data.default_collate`."""
    feeder_index: int = 0
    num_feeders: int = 1
    order: OrderFunction = shuffled
    """Says in which order an epoch is read, and how long it is."""
    drop_last: bool = False
    """Leave out the last group of an epoch when it is not full."""
    fixed_size: bool = False
    """Give every microbatch exactly `micro_batch` rows, repeating samples where there are fewer."""
    workers: int = 0
    """Processes that fetch; with none, nothing is fetched ahead."""
    prefetch: int = 2
    """Microbatches that each worker keeps ready."""
    start_method: str | None = None
    """How workers start: fork, forkserver or spawn; None is the platform's default."""
    isolate_random: bool | None = None
    """See the top of this file; None is "with workers". False with workers seeds each microbatch
    instead of each sample: still exact on resume, but then augmentation depends on the cut."""
    steps_per_epoch: int = field(init=False)

    def __post_init__(self) -> None:
        if not 0 <= self.feeder_index < self.num_feeders:
            raise SettingError(f"feeder_index is {self.feeder_index}, of {self.num_feeders}")
        if self.micro_batch < 1 or self.workers < 0 or self.prefetch < 1:
            raise SettingError(
                f"micro_batch ({self.micro_batch}) and prefetch ({self.prefetch}) must be 1 or "
                f"more, workers ({self.workers}) 0 or more"
            )
        if self.global_batch < self.num_feeders:
            raise SettingError(
                f"a global batch of {self.global_batch} samples cannot be dealt to "
                f"{self.num_feeders} feeders: raise it, or start fewer processes"
            )
        self._num_samples = _count_samples(self.dataset)
        epoch_samples = len(self._open(epoch=0))
        self.steps_per_epoch = steps_per_epoch(epoch_samples, self.global_batch, self.drop_last)

    def groups(self, start: Position, num_steps: int) -> Generator[Group, None, None]:
        """The next `num_steps` groups, across epochs. Close it, or drop it, to end its workers.

        Raises `DataError` when a sample cannot be fetched, or `WorkerFailed` with workers.
        """
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

    def _fetch(self, requests: Iterator[Request]) -> Generator[Microbatch, None, None]:
        isolate = self.workers > 0 if self.isolate_random is None else self.isolate_random
        fetcher = Fetcher(self.dataset, self.collate or default_collate, self.seed, isolate)
        if self.workers:
            return from_workers(fetcher, requests, self.workers, self.prefetch, self.start_method)
        return (fetcher(request) for request in requests)

    def _steps(self, start: Position) -> Iterator[_Step]:
        """The plan of each step, without end."""
        epoch, offset = start.epoch, start.samples
        while True:
            order = ReadAhead(self._open(epoch))
            length = len(order)
            if offset > length:
                raise DataError(f"{offset} samples of epoch {epoch} were consumed, it has {length}")
            while offset < length:
                size = min(self.global_batch, length - offset)
                if self.drop_last and size < self.global_batch:
                    break
                stop = offset + size
                full = self.global_batch if self.drop_last else 1
                after = Position(epoch, stop) if length - stop >= full else Position(epoch + 1)
                cut_up = cut_to_size if self.fixed_size else cut
                parts = cut_up(size, self.micro_batch, self.feeder_index, self.num_feeders)
                yield _Step(Position(epoch, offset), after, size, parts, order)
                offset = stop
            epoch, offset = epoch + 1, 0

    def _open(self, epoch: int) -> Order:
        order = self.order(self._num_samples, self.seed, epoch)
        if len(order) == 0:
            raise DataError(f"the order of epoch {epoch} holds no samples")
        if self.drop_last and len(order) < self.global_batch:
            raise DataError(
                f"an epoch of {len(order)} samples holds no full global batch of "
                f"{self.global_batch}: lower the batch or keep the last one (drop_last=False)"
            )
        return order


class _Step(NamedTuple):
    position: Position
    next: Position
    num_samples: int
    parts: tuple[Part, ...]
    order: ReadAhead

    def requests(self) -> Iterator[Request]:
        epoch, base = self.position.epoch, self.position.samples
        for start, stop, num_samples, repeats in self.parts:
            indices = self.order.read(base + start, base + stop)
            yield Request(epoch, base + start, indices, num_samples, repeats)


def eval_batches(
    dataset: Any, *, micro_batch: int, num_feeders: int = 1, **options: Any
) -> Generator[Microbatch, None, None]:
    """Every sample once, in order, on exactly one feeder; as many batches on every feeder.

    The n-th batches of all feeders are neighbours: put one after the other by feeder, without
    the idle ones (`num_samples` of 0), they continue the data set at the first one's `offset`.
    `options`: others of `Loader`.
    """
    loader = Loader(
        dataset,
        global_batch=micro_batch * num_feeders,
        micro_batch=micro_batch,
        num_feeders=num_feeders,
        order=sequential,
        **options,
    )
    with closing(loader.groups(Position(), loader.steps_per_epoch)) as groups:
        for group in groups:
            yield from group.microbatches


def _count_samples(dataset: Any) -> int:
    indexed = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if not indexed or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{type(dataset).__name__} has no length or cannot be indexed: a map-style data set "
            "(__len__ and __getitem__) is needed, so that a run can resume at any sample. Write "
            "a stream to disk first, or keep it in a list."
        )
    if len(dataset) == 0:
        raise DataError(f"{type(dataset).__name__} holds no samples")
    return len(dataset)

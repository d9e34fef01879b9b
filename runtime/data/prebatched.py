"""Ready batches: the microbatches of the user's own loader, used as they come.

Each reader has its own loader, such as a `torch.utils.data.DataLoader`, which must hold this
reader's part of the data. A position is the number of batches taken; a resume reads that many
batches again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

from ..kernel.batches import Group, Microbatch, Position
from ..kernel.contract import Session
from ..kernel.errors import DataError, DataFailed, SettingError
from ..kernel.recipe import Batch
from .batch_sizes import BatchSizes
from .indexed import NativeOrderSource, length_of, through_epochs
from .nested import tensors_of
from .order import mix
from .own_generators import OpenedEpochs, end_workers, own_states, states_of
from .partition import steps_per_epoch
from .random_state import generators_kept, seed_generators
from .reading import OPENING, set_epoch_everywhere
from .user_frames import last_line

__all__ = ["Batches", "PrebatchedLoader", "count_rows"]


def count_rows(batch: Batch) -> int:
    """Return the first dimension of the first tensor of a batch. Raises `DataError` if there is
    none."""
    for tensor in tensors_of(batch):
        if tensor.dim():
            return len(tensor)
    raise DataError(
        f"a batch of type {type(batch).__name__} holds no tensor with a row for each sample: say "
        "how many samples it has with Batches(count_samples=...)"
    )


@dataclass(frozen=True)
class Batches:
    """Marks data of a recipe as ready batches: `Recipe(train_data=Batches(loader), ...)`.

    The settings' `global_batch` and `micro_batch` then only say which sizes a driver is to expect.
    """

    loader: Any
    """An iterable of this reader's batches; `set_epoch` of it, or of its sampler or data set, is
    called before an epoch is read."""
    accumulation: int = 1
    """Batches of each reader in one update."""
    count_samples: Callable[[Batch], int] = count_rows
    isolate_random: bool = True
    """Seed the generators for opening an epoch and for each batch, by (seed, epoch, batch), so that
    a resumed run draws the same numbers; persistent workers are started again for each epoch.
    False: random numbers are the process's, persistent workers stay, and resuming is exact only if
    the loader depends on neither. The loader's own generators are resumed in any case."""

    def __post_init__(self) -> None:
        if self.accumulation < 1:
            raise SettingError(f"accumulation is {self.accumulation}; it must be at least 1")


class PrebatchedLoader(NativeOrderSource):
    """The source of ready batches, from any position on, for one reader.

    Readers may have different numbers of batches: a reader without a next batch runs its last one
    again, counted as 0 samples. All ranks construct and read it together.
    """

    def __init__(
        self,
        batches: Batches,
        session: Session,
        *,
        seed: int = 0,
        num_epochs: int | None = None,
        drop_last: bool = False,
        count_items: Callable[[Batch], int] | None = None,
    ) -> None:
        self.batches, self.session, self.seed = batches, session, seed
        self.num_epochs, self.drop_last = num_epochs, drop_last
        self._count_items = count_items or batches.count_samples
        self._opened = OpenedEpochs(batches.loader)
        self.sizes = BatchSizes(batches.accumulation * session.world.num_readers)
        lengths = session.exchange(length_of(batches.loader))
        self.num_samples = None
        self.epoch_length = None
        self.steps_per_epoch: int | None = None
        if None not in lengths:
            self.epoch_length = max(lengths) * session.world.num_readers
            self.steps_per_epoch = steps_per_epoch(max(lengths), batches.accumulation, drop_last)

    def begun(self, position: Position) -> dict[str, Any]:
        """See `Source`."""
        everyone = self.session.exchange(self._opened.to_json(position.epoch))
        return {"generators": states_of(everyone)} if any(everyone) else {}

    def resume(self, position: Position, begun: Mapping[str, Any]) -> None:
        """See `Source`."""
        if begun:
            world = self.session.world
            own = own_states(begun.get("generators"), world.rank, world.size)
            self._opened.resume(position.epoch, own)

    def groups(self, start: Position, num_steps: int) -> Generator[Group, None, None]:
        """See `Source`."""
        yield from islice(through_epochs(start, self.num_epochs, self._epoch), num_steps)

    def where(self, position: Position, num_samples: int) -> str:
        """See `Source`."""
        first = position.samples // self.session.world.num_readers
        return (
            f"the {num_samples} samples of batches {first} to "
            f"{first + self.batches.accumulation - 1} of each rank in epoch {position.epoch}"
        )

    def _epoch(self, start: Position) -> Iterator[Group]:
        """Yield the groups from `start` to the end of its epoch."""
        size, readers = self.batches.accumulation, self.session.world.num_readers
        if start.samples % readers:
            raise DataError(
                f"{start.samples} ready batches were taken, which {readers} readers cannot have "
                "shared equally: resume with a number of processes that divides it, or hand over "
                "the data set itself, which resumes with any"
            )
        self._opened.open(start.epoch)
        reading = _Pass(self.batches, self.seed, start.epoch, self.session.world.reader_index)
        reading.skip(start.samples // readers)
        position, first_row = start, 0
        while True:
            taken = reading.take(size)
            rows, over = self._compare(taken, reading.over)
            num_microbatches = sum(map(any, zip(*rows, strict=True)))
            if num_microbatches < (size if self.drop_last else 1):
                return
            num_samples = sum(map(sum, rows))
            after = (
                Position(start.epoch + 1)
                if over
                else Position(start.epoch, position.samples + size * readers)
            )
            spares = [reading.spare()] * (num_microbatches - len(taken))
            microbatches = self._microbatches([*taken, *spares], rows, first_row)
            num_items = float(sum(map(self._count_items, taken)))
            yield Group(position, after, num_samples, num_microbatches, microbatches, num_items)
            position, first_row = after, first_row + num_samples

    def _compare(self, taken: Sequence[Batch], over: bool) -> tuple[list[list[int]], bool]:
        """Return the rows of each reader's next batches (0: no batch), and whether all readers are
        at the end."""
        world, size = self.session.world, self.batches.accumulation
        mine = [self.batches.count_samples(batch) for batch in taken]
        if not all(mine):
            raise DataError("a ready batch holds no samples")
        counted = [0] * (world.num_readers * size)
        first = world.reader_index * size
        counted[first : first + len(mine)] = mine
        not_over, *counts = self.session.tally([float(not over), *counted])()
        rows = [int(count * world.replicated_sum_weight) for count in counts]
        return [rows[i : i + size] for i in range(0, len(rows), size)], not not_over

    def _microbatches(
        self, batches: Sequence[Batch], rows: Sequence[Sequence[int]], first_row: int
    ) -> Iterator[Microbatch]:
        """Yield microbatches. Samples are numbered through the first batches of all readers, then
        the second ones."""
        reader, readers = self.session.world.reader_index, len(rows)
        by_turn = [own[number] for number in range(len(batches)) for own in rows]
        starts = list(accumulate(by_turn, initial=first_row))
        for number, batch in enumerate(batches):
            yield Microbatch(batch, rows[reader][number], starts[number * readers + reader])


class _Pass:
    """One epoch of a reader's loader, with one batch read ahead to detect the end."""

    def __init__(self, batches: Batches, seed: int, epoch: int, reader: int) -> None:
        self._isolated = batches.isolate_random
        self._seed, self._epoch, self._reader = seed, epoch, reader
        self._number, self._ended = 0, False
        self._ahead: list[Batch] = []
        self._last: list[Batch] = []
        if self._isolated:
            end_workers(batches.loader)
        with self._random_numbers(mix(seed, epoch, OPENING)):
            set_epoch_everywhere(batches.loader, epoch)
            self._iterator = iter(batches.loader)

    def skip(self, num_batches: int) -> None:
        """Read and drop a number of batches; the process's generators are not changed."""
        with generators_kept():
            for _ in range(num_batches):
                self._read()
                self._ahead.clear()
        if self._ended:
            raise DataError(
                f"{num_batches} batches of epoch {self._epoch} were taken by this reader, and its "
                f"loader ends after {self._number}: it is not the one that was trained on, or an "
                "iterator of which a part was read before"
            )

    def take(self, num_batches: int) -> list[Batch]:
        """Return the next batches; fewer at the end of the epoch."""
        while len(self._ahead) <= num_batches and not self._ended:
            self._read()
        taken, self._ahead = self._ahead[:num_batches], self._ahead[num_batches:]
        self._last = taken[-1:] or self._last
        return taken

    @property
    def over(self) -> bool:
        """True if `take` has no more batches to give."""
        return not self._ahead

    def spare(self) -> Batch:
        """Return a batch for an idle microbatch, while other readers have more batches."""
        if not self._last:
            raise DataError(
                f"reader {self._reader} was given no batch in epoch {self._epoch}, and others were"
            )
        return self._last[0]

    def _read(self) -> None:
        try:
            with self._random_numbers(mix(self._seed, self._epoch, self._number, self._reader)):
                self._ahead.append(next(self._iterator))
            self._number += 1
        except StopIteration:
            self._ended = True
        except (Exception, SystemExit) as error:
            raise DataFailed(
                f"batch {self._number} of epoch {self._epoch} could not be read from the loader: "
                f"{last_line(error)}"
            ) from error

    @contextmanager
    def _random_numbers(self, seed: int) -> Iterator[None]:
        if not self._isolated:
            yield
            return
        with generators_kept():
            seed_generators(seed)
            yield

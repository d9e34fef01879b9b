"""Streams: data without an index, and often without a length, that can only be read from the front.

Every reader reads the whole stream and keeps its part of each global batch. So, as for other data,
which samples train together does not depend on the number of readers. A position is the number of
samples read in the epoch, and the stream's own state there, if it has `state_dict` and
`load_state_dict`. A stream without these is read again up to the position. So is a shuffled stream
of the datasets library, whose state leaves out its shuffle buffer. Any other state is trusted: wrap
a stream with an incomplete state in `ReadAgain`.

Random numbers are isolated for each sample (see `indexed.py`): reading again draws the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import default_collate

from ..kernel.batches import Group, Microbatch, Position
from ..kernel.errors import DataError, DataFailed, SettingError
from ..kernel.recipe import Batch
from .indexed import NativeOrderSource, length_of, through_epochs
from .left_out import count_rows
from .loader_settings import LoaderSettings
from .order import mix
from .partition import Part, named_samples, steps_per_epoch
from .random_state import generators_kept, seed_generators
from .reading import StreamReader, set_epoch_everywhere
from .sample_digest import digest_of
from .user_frames import last_line
from .workers import COLLATE, from_one_worker

__all__ = ["ReadAgain", "StreamLoader"]

DIGESTED = 8
"""Number of samples at the beginning of an epoch that are compared between readers."""


class ReadAgain:
    """A stream without its state: resuming reads the epoch again, up to the position. For streams
    whose state is incomplete, such as streams that shuffle samples in a buffer.
    """

    def __init__(self, stream: Iterable[Any]) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stream)

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the stream."""
        set_epoch_everywhere(self.stream, epoch)


@dataclass(eq=False, repr=False)
class StreamLoader(NativeOrderSource, LoaderSettings):
    """The source of a stream, from any position on, for one reader.

    With `workers=1` the stream is read in another process.
    """

    stream: Any
    """An iterable of samples, or a function without arguments that makes one for each epoch. Its
    `set_epoch(epoch)`, if it exists, is called before an epoch is read."""
    _: KW_ONLY
    num_epochs: int | None = None
    """None: no limit."""
    num_samples: int | None = field(init=False)
    epoch_length: int | None = field(init=False)
    steps_per_epoch: int | None = field(init=False)
    _first_epoch: int | None = field(init=False, default=None)
    """The number of samples in the first epoch of a stream without a length, once it was read to
    its end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers > 1:
            raise SettingError(
                f"data.workers is {self.workers}, and a stream has one order, which one worker "
                "reads: set data.workers=1, or hand over a loader that has workers of its own "
                "(torchdata's StatefulDataLoader with batch_size=None)"
            )
        if not (hasattr(self.stream, "__iter__") or callable(self.stream)):
            raise DataError(
                f"{type(self.stream).__name__} can be neither indexed (__len__ and __getitem__) "
                "nor iterated over, and is no function that makes an iterable"
            )
        length = length_of(self.stream)
        self.num_samples = self.epoch_length = length
        self.steps_per_epoch = (
            None if length is None else steps_per_epoch(length, self.global_batch, self.drop_last)
        )

    def groups(self, start: Position, num_steps: int) -> Generator[Group, None, None]:
        """See `Source`."""
        read: Callable[[], Iterator[Group]]
        read = partial(through_epochs, start, self.num_epochs, self._epoch)
        if self.workers:
            groups = from_one_worker(read, self.prefetch, self.start_method)
        else:
            groups = (group for group in read())
        with closing(groups):
            yield from islice(groups, num_steps)

    def where(self, position: Position, num_samples: int) -> str:
        """See `Source`."""
        return f"{named_samples(position, num_samples)} of the stream"

    def _epoch(self, start: Position) -> Iterator[Group]:
        """Yield the groups from `start` to the end of its epoch."""
        before = self._samples_before(start.epoch)
        reading = _Pass(
            self.stream, self.seed, start, lambda at: self.sizes.at(before + at), self.drop_last
        )
        position, digest = start, 0
        while samples := reading.take():
            if position == start:
                self._check_grown(start.epoch)
                digest = digest_of(samples[:DIGESTED]) if self.num_readers > 1 else 0
            over = reading.over
            after = (
                Position(start.epoch + 1)
                if over
                else Position(start.epoch, position.samples + len(samples), reading.state)
            )
            parts = self.parts(len(samples))
            with generators_kept():
                own = [self._microbatch(samples, part, position) for part in parts]
            group = Group(position, after, len(samples), len(own), iter(own), digest=digest)
            yield count_rows(group) if self.counts_rows else group
            position, digest = after, 0
        if self.epoch_length is None and start.epoch == 0:
            self._first_epoch = reading.taken

    def _samples_before(self, epoch: int) -> int:
        """Return the number of samples in earlier epochs. Without a length it is unknown, and the
        samples of the batch warm-up are assumed, so that sizes grow in the first epoch alone."""
        length = self.sizes.grown_at if self.epoch_length is None else self.epoch_length
        return epoch * length

    def _check_grown(self, epoch: int) -> None:
        if epoch and self._first_epoch is not None and self._first_epoch < self.sizes.grown_at:
            raise DataError(
                f"the first epoch of the stream ended after {self._first_epoch} samples, and "
                f"data.batch_warmup={self.batch_warmup} takes {self.sizes.grown_at}: lower it, or "
                "give the stream a length (__len__), so that the batch grows across epochs"
            )

    def _microbatch(self, samples: list[Any], part: Part, position: Position) -> Microbatch:
        start, stop, num_samples, repeats = part
        offset = position.samples + start
        seed_generators(mix(self.seed, position.epoch, offset, COLLATE))
        collate: Callable[[list[Any]], Batch] = self.collate or default_collate
        try:
            batch = collate(samples[start:stop] * repeats)
        except (Exception, SystemExit) as error:
            raise DataFailed(
                f"the {stop - start} samples from offset {offset} of epoch {position.epoch} could "
                f"not be collated: {last_line(error)}"
            ) from error
        return Microbatch(batch, num_samples, offset, repeats)


class _Pass:
    """One epoch of a stream, read from a position on, a group at a time.

    `size_at` returns the size of the group that begins after a number of samples of the epoch.
    """

    state: Mapping[str, Any] | None = None
    """The stream's own state after the samples taken last."""

    def __init__(
        self,
        stream: Any,
        seed: int,
        start: Position,
        size_at: Callable[[int], int],
        drop_last: bool,
    ) -> None:
        self._size_at, self._drop_last = size_at, drop_last
        self.taken = start.samples
        """Number of samples of the epoch up to the end of the last group."""
        self._read_to, self._ahead = start.samples + size_at(start.samples), 0
        self._buffer: list[Any] = []
        self._states: deque[Mapping[str, Any] | None] = deque()
        with generators_kept():
            self._reading = StreamReader(stream, seed, start)

    def take(self) -> list[Any]:
        """Return the samples of the next group; none after the end of the epoch."""
        size = self._size_at(self.taken)
        self._ahead = self._size_at(self.taken + size) if self._drop_last else 1
        with generators_kept():
            while len(self._buffer) < size + self._ahead and self._pull():
                pass
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        is_full = len(taken) == size
        self.state = self._states.popleft() if is_full else None
        if self._drop_last and not is_full:
            return []
        self.taken += len(taken)
        return taken

    @property
    def over(self) -> bool:
        """True if the samples read ahead are too few to be trained on."""
        return len(self._buffer) < self._ahead

    def _pull(self) -> bool:
        found, sample = self._reading.next()
        if found:
            self._buffer.append(sample)
            if self._reading.offset == self._read_to:
                self._states.append(self._reading.state())
                self._read_to += self._size_at(self._read_to)
        return found

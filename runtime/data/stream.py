"""Streams: data that can only be read from the front, without an index and often without a length.

Every reader reads the whole stream and keeps its part of each global batch, so that which samples
train together does not depend on the number of readers, as for other data. A position is how many
samples of the epoch were read, and the stream's own state there, if it has `state_dict` and
`load_state_dict`; a stream that has not is read again up to the position, and so is one of the
datasets library that was shuffled, whose state forgets its buffer. Any other state is trusted: wrap
a stream that forgets something in `ReadAgain`.

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
from .indexed import Dealing, InOwnOrder, length_of, through_epochs
from .order import mix
from .partition import Part, steps_per_epoch
from .random_state import generators_kept, seed_generators
from .reading import Reading, tell_epoch
from .user_frames import last_line
from .workers import COLLATE, from_one_worker

__all__ = ["ReadAgain", "StreamLoader"]


class ReadAgain:
    """A stream without its state: resuming reads the epoch again, up to the position. For streams
    whose state does not hold all of it, as where samples are shuffled in a buffer.
    """

    def __init__(self, stream: Iterable[Any]) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stream)

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the stream."""
        tell_epoch(self.stream, epoch)


@dataclass(eq=False, repr=False)
class StreamLoader(InOwnOrder, Dealing):
    """The groups of a stream, from any position on, as one reader sees them.

    With `workers=1` the stream is read in another process.
    """

    stream: Any
    """An iterable of samples, or a function without arguments that makes one for each epoch. Its
    `set_epoch(epoch)` is called, where there is one, before an epoch is read."""
    _: KW_ONLY
    num_epochs: int | None = None
    """None: as many as are asked for."""
    num_samples: int | None = field(init=False)
    epoch_length: int | None = field(init=False)
    steps_per_epoch: int | None = field(init=False)

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

    @property
    def _group_length(self) -> int:
        return self.global_batch

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
        last = position.samples + num_samples - 1
        return f"samples {position.samples} to {last} of epoch {position.epoch} of the stream"

    def _epoch(self, start: Position) -> Iterator[Group]:
        """The groups from `start` to the end of its epoch."""
        ahead = self.global_batch if self.drop_last else 1
        reading = _Pass(self.stream, self.seed, start, self.global_batch, ahead)
        position = start
        while samples := reading.take():
            if self.drop_last and len(samples) < self.global_batch:
                return
            over = reading.over
            after = (
                Position(start.epoch + 1)
                if over
                else Position(start.epoch, position.samples + len(samples), reading.state)
            )
            parts = self.parts(len(samples))
            with generators_kept():
                own = [self._microbatch(samples, part, position) for part in parts]
            yield Group(position, after, len(samples), len(own), iter(own))
            position = after

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
    """One epoch of a stream, read from a position on, `size` samples at a time."""

    state: Mapping[str, Any] | None = None
    """The stream's own, where the samples last taken end."""

    def __init__(self, stream: Any, seed: int, start: Position, size: int, ahead: int) -> None:
        self._start, self._size, self._ahead = start.samples, size, ahead
        self._buffer: list[Any] = []
        self._states: deque[Mapping[str, Any] | None] = deque()
        with generators_kept():
            self._reading = Reading(stream, seed, start)

    def take(self) -> list[Any]:
        """The next `size` samples, fewer at the end of the epoch, none after it."""
        with generators_kept():
            while len(self._buffer) < self._size + self._ahead and self._pull():
                pass
        taken, self._buffer = self._buffer[: self._size], self._buffer[self._size :]
        self.state = self._states.popleft() if len(taken) == self._size else None
        return taken

    @property
    def over(self) -> bool:
        """True if the samples read ahead are too few to be trained on."""
        return len(self._buffer) < self._ahead

    def _pull(self) -> bool:
        found, sample = self._reading.next()
        if found:
            self._buffer.append(sample)
            if (self._reading.offset - self._start) % self._size == 0:
                self._states.append(self._reading.state())
        return found

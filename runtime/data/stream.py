"""Streams: data that can only be read from the front, without an index and often without a length.

Every feeder reads the whole stream and keeps its part of each global batch, so that which samples
train together does not depend on the number of feeders, as for other data. A position is how many
samples of the epoch were read, and the stream's own state there, if it has `state_dict` and
`load_state_dict`; a stream that has not is read again up to the position. A state is trusted:
wrap a stream that forgets something in `ReadAgain`.

Random numbers are isolated for each sample (see `indexed.py`): reading again draws the same.
"""

from __future__ import annotations

import json
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
from .user_frames import last_line
from .workers import COLLATE, from_one_worker

__all__ = ["OPENING", "ReadAgain", "StreamLoader", "set_epoch", "tell_epoch"]

OPENING = 2
"""Distinguishes the seed of opening an epoch from those of its first sample and of a collation."""


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
    """The groups of a stream, from any position on, as one feeder sees them.

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
        self._seed, self._epoch, self._offset = seed, start.epoch, start.samples
        self._start, self._size, self._ahead = start.samples, size, ahead
        self._buffer: list[Any] = []
        self._states: deque[Mapping[str, Any] | None] = deque()
        with generators_kept():
            seed_generators(mix(seed, start.epoch, OPENING))
            opened = stream if hasattr(stream, "__iter__") else stream()
            tell_epoch(opened, start.epoch)
            stateful = hasattr(opened, "state_dict") and hasattr(opened, "load_state_dict")
            self._stateful = opened if stateful else None
            if stateful and start.state is not None:
                opened.load_state_dict(json.loads(json.dumps(start.state)))
            self._iterator = iter(opened)
            if not stateful or start.state is None:
                self._skip(start.samples)

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
        found, sample = self._next(self._offset)
        if not found:
            return False
        self._offset += 1
        self._buffer.append(sample)
        if (self._offset - self._start) % self._size == 0:
            self._states.append(self._state())
        return True

    def _next(self, offset: int) -> tuple[bool, Any]:
        seed_generators(mix(self._seed, self._epoch, offset))
        try:
            return True, next(self._iterator)
        except StopIteration:
            return False, None
        except (Exception, SystemExit) as error:
            raise DataFailed(
                f"sample {offset} of epoch {self._epoch} could not be read from the stream: "
                f"{last_line(error)}"
            ) from error

    def _skip(self, num_samples: int) -> None:
        for offset in range(num_samples):
            if not self._next(offset)[0]:
                raise DataError(
                    f"{num_samples} samples of epoch {self._epoch} were consumed, and the stream "
                    f"ends after {offset}: it is not the one that was trained on, or an iterator "
                    "of which a part was read before; give something that can be iterated over "
                    "again, or a function that makes it"
                )

    def _state(self) -> Mapping[str, Any] | None:
        if self._stateful is None:
            return None
        state = self._stateful.state_dict()
        complaint = _not_json(state, "state_dict()")
        if complaint is None and not isinstance(state, dict):
            complaint = f"state_dict() is a {type(state).__name__}"
        if complaint is not None:
            raise DataError(
                f"the state of the stream {type(self._stateful).__name__} cannot be kept in a "
                f"checkpoint: {complaint}; it may hold dicts with text as keys, lists, text, "
                "numbers, booleans and None. Without it: ReadAgain(stream), which resumes by "
                "reading the epoch again"
            )
        kept: dict[str, Any] = json.loads(json.dumps(state))  # the stream may go on changing it
        return kept


def _not_json(value: Any, where: str) -> str | None:
    """Names the first part that JSON would not return unchanged; None if there is none."""
    if value is None or type(value) in (bool, int, str):
        return None
    if type(value) is float:
        return None if value - value == 0 else f"{where} is {value}"
    if type(value) is list:
        parts = ((item, f"{where}[{index}]") for index, item in enumerate(value))
    elif type(value) is dict:
        odd = [key for key in value if type(key) is not str or key.startswith("$")]
        if odd:
            return f"{where} has the key {odd[0]!r}"
        parts = ((item, f"{where}[{key!r}]") for key, item in value.items())
    else:
        return f"{where} is a {type(value).__name__}"
    return next((found for part, at in parts if (found := _not_json(part, at))), None)


def tell_epoch(data: Any, epoch: int) -> None:
    """Call `set_epoch` of the data and of the parts that a `DataLoader` has."""
    parts = [data, *(getattr(data, name, None) for name in ("batch_sampler", "sampler", "dataset"))]
    for part in parts:
        set_epoch(part, epoch)


def set_epoch(listener: Any, epoch: int) -> None:
    """Call `set_epoch` of the listener, if it has one."""
    if callable(told := getattr(listener, "set_epoch", None)):
        told(epoch)

"""The random state of data workers, for checkpoints.

A worker's generators depend on its seed and on everything that the worker has fetched. So a worker
sends the state of its generators with each batch that has changed it. The training process keeps
the newest states. Workers of a resumed run are started with the same seeds, and get the states from
before the batch that each of them fetches first. An uninterrupted run is not affected: its workers
draw the same numbers as in a plain DataLoader.

Batch k is fetched by worker k modulo the number of workers. A run that resumes within a round
begins with the first batch of the round, and skips the batches that it has trained on. So each
worker keeps its number.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ...data.own_generators import generators_of, set_state_of, state_of
from ...kernel.errors import DataError

__all__ = ["WorkerStates"]

_READ_AHEAD = 64
"""Number of batches that may have been read but not trained on when a checkpoint is written."""

States = list[str | None]
"""The state of each worker; None: its initial state."""


class _Noted(NamedTuple):
    """A batch, with the state of the worker's generators after it if the batch has changed it."""

    batch: Any
    state: str | None


class _Worker:
    """The functions of a DataLoader that run in a worker, with recording of its state."""

    def __init__(
        self,
        collate: Callable[[Any], Any],
        begin: Callable[[int], None] | None,
        states: States,
    ) -> None:
        self._collate, self._begin, self._states = collate, begin, states
        self._generators: list[Any] = []
        self._last: Any = None

    def begin(self, worker: int) -> None:
        """Initialize a worker; replaces `worker_init_fn`."""
        if self._begin is not None:
            self._begin(worker)
        info = get_worker_info()
        self._generators = generators_of(None if info is None else info.dataset)
        state = self._states[worker]
        if state is not None:
            _put_back(state, self._generators)
        self._last = self._now()

    def collate(self, samples: Any) -> _Noted:
        """Collate a batch, its last step; replaces `collate_fn`."""
        batch, now = self._collate(samples), self._now()
        if now == self._last:
            return _Noted(batch, None)
        self._last = now
        return _Noted(batch, json.dumps([*map(state_of, (*_of_process(), *self._generators))]))

    def _now(self) -> Any:
        """Return the state in a form that is fast to get and to compare."""
        of_numpy: Any = numpy.random.get_state()
        kind, words, *rest = of_numpy
        return (
            random.getstate(),
            torch.default_generator.get_state().numpy().tobytes(),
            (kind, words.tobytes(), *rest),
            [state_of(generator) for generator in self._generators],
        )


class WorkerStates:
    """The states of a loader's workers over the epochs of a run. `count`: number of workers; 0 if
    nothing is recorded."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._epoch = -1
        self._first = 0
        self._total: int | None = None
        self._is_stream = self._stay = False
        self._seeding: torch.Tensor | None = None
        self._start: States = []
        self._after: dict[int, str | None] = {}
        self._received = 0
        self._resumed: tuple[int, int, int, torch.Tensor, States] | None = None

    # --- saving and resuming ------------------------------------------------------------------

    def to_bytes(self, epoch: int, num_batches: int) -> bytes | None:
        """Return JSON for a run that resumes after a number of batches of this epoch; None if it
        needs nothing, or a state is unknown."""
        within = epoch == self._epoch and (num_batches or self._stay)
        between = self._stay and (epoch, num_batches) == (self._epoch + 1, 0)
        if not (within or between) or self._seeding is None:
            return None
        again = 0
        try:
            if between:
                states = self._at_end()
            elif self._is_stream:
                states = self._start
            else:
                again = (num_batches - self._first) % self.count
                first = num_batches - again
                states = [self._before(first + worker) for worker in range(self.count)]
        except KeyError:
            return None
        seeding = base64.b64encode(self._seeding.numpy().tobytes()).decode()
        return json.dumps({"again": again, "seeding": seeding, "states": states}).encode()

    def resume(self, epoch: int, num_batches: int, stored: bytes) -> bool:
        """Start the workers like those of the run that stored these states. Return False if the
        number of workers differs. Raises ValueError for anything but a result of `to_bytes`."""
        try:
            value = json.loads(stored)
            again, states = value["again"], value["states"]
            raw = bytearray(base64.b64decode(value["seeding"], validate=True))
            seeding = torch.frombuffer(raw, dtype=torch.uint8)
            torch.Generator().set_state(seeding)
            for state in states:
                if state is not None:
                    _put_back(state, None)
        except (RecursionError, KeyError, TypeError, ValueError, RuntimeError, DataError) as error:
            raise ValueError(f"states of data workers are malformed: {error}") from error
        if type(again) is not int or not 0 <= again <= num_batches:
            raise ValueError(f"states of data workers are malformed: again is {again!r:.80}")
        if len(states) != self.count:
            return False
        self._resumed = (epoch, num_batches, again, seeding, states)
        return True

    def first_batch(self, epoch: int, num_batches: int) -> int:
        """Return the number of the batch to fetch first after `num_batches` were trained on."""
        if self._resumed is None or self._resumed[:2] != (epoch, num_batches):
            self._resumed = None
            return num_batches
        return num_batches - self._resumed[2]

    # --- an epoch -----------------------------------------------------------------------------

    def open(
        self,
        loader: DataLoader[Any],
        epoch: int,
        first: int,
        stay: bool,
        begin: Callable[[], Any],
    ) -> Any:
        """Open an epoch of a loader that begins with batch `first`; returns the result of
        `begin()`, the iterator. `stay`: its workers stay for the next epoch."""
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        kept = loader.generator, loader.collate_fn, loader.worker_init_fn
        seeding, start = self._earlier(stay)
        if loader._iterator is None or not loader.persistent_workers:
            if seeding is None:
                seeding = (loader.generator or torch.default_generator).get_state()
            else:
                if self._resumed is not None and not (stay and epoch):
                    _draw_seed(loader.generator)  # as the resumed run did
                loader.generator = torch.Generator()
                loader.generator.set_state(seeding)
            worker = _Worker(loader.collate_fn, loader.worker_init_fn, start)
            loader.collate_fn, loader.worker_init_fn = worker.collate, worker.begin
        try:
            batches = begin()
        finally:
            loader.generator, loader.collate_fn, loader.worker_init_fn = kept
        if seeding is not None:
            generator = torch.Generator()
            generator.set_state(seeding)
            if _draw_seed(generator) != batches._base_seed:  # a sampler drew before it
                seeding = None
        self._seeding, self._start = seeding, start
        self._epoch, self._first, self._stay, self._resumed = epoch, first, stay, None
        self._after, self._received, self._total = {}, first, None
        if not self._is_stream:
            with suppress(TypeError):
                self._total = first + len(loader)
        return batches

    def _earlier(self, stay: bool) -> tuple[torch.Tensor | None, States]:
        """Return the seeds and states of workers that were started before, here or in the run that
        is resumed; None and no state for new workers, or if they are unknown."""
        if self._resumed is not None:
            return self._resumed[3:]
        if self._epoch >= 0 and stay:
            with suppress(KeyError):
                return self._seeding, self._at_end()
        return None, [None] * self.count

    def received(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of this epoch without the states."""
        for number, noted in enumerate(batches, self._first):
            self._received = number + 1
            if isinstance(noted, _Noted):
                state = noted.state
                self._after[number] = self._before(number) if state is None else state
                self._after.pop(number - 2 * self.count - _READ_AHEAD, None)
                yield noted.batch
            else:  # from workers that other code has started
                self._seeding = None
                yield noted
        self._total = self._received

    def _before(self, number: int) -> str | None:
        """Return a worker's state before it fetched a batch. Raises KeyError if it is unknown."""
        last = number - self.count
        if last < self._first:
            return self._start[(number - self._first) % self.count]
        return self._after[last]

    def _at_end(self) -> States:
        """Return the states after the last batch of the epoch. Raises KeyError if they are unknown:
        the end was not read, or the end of a stream may have drawn numbers."""
        if self._is_stream or self._received != self._total:
            raise KeyError(self._epoch)
        done = self._received - self._first
        nexts = [self._received + (worker - done) % self.count for worker in range(self.count)]
        return [self._before(number) for number in nexts]


def _draw_seed(generator: torch.Generator | None) -> int:
    """Draw the seed of workers, as a DataLoader does."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _of_process() -> tuple[Any, ...]:
    return torch.default_generator, random, numpy.random


def _put_back(text: str, own: list[Any] | None) -> None:
    """Restore the generators of the process, and these, from `text`. None only checks whether that
    is possible. Raises `DataError` or ValueError."""
    states = json.loads(text)
    if own is None:
        generators: Any = (torch.Generator(), random.Random(), numpy.random.RandomState())
        pairs = zip(generators, states[:3], strict=True)
    else:
        pairs = zip((*_of_process(), *own), states, strict=True)
    for generator, state in pairs:
        set_state_of(generator, state)

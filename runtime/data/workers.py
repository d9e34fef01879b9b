"""Fetches and collates microbatches in this process or in workers."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..kernel.batches import Microbatch
from ..kernel.errors import DataFailed, DrivetrainError, WorkerFailed
from ..kernel.recipe import Batch
from .killed_workers import context_of, detach_death_handler, ended, notice_torn_results
from .order import mix
from .parent import end_with_parent
from .random_state import generators_kept, seed_generators
from .reading import set_epoch
from .socket_paths import keep_socket_paths_short
from .stop_signals import blocked, leave_to_parent
from .user_frames import last_line, user_frames

__all__ = [
    "COLLATE",
    "Fetcher",
    "MicrobatchRequest",
    "from_one_worker",
    "from_workers",
]

_MOST_NAMED = 8
"""Samples whose indices a message names; further ones are counted."""


COLLATE = 1
"""Distinguishes the seed of a collation from that of its first sample."""

T = TypeVar("T")


class MicrobatchRequest(NamedTuple):
    """The samples to fetch for one microbatch."""

    epoch: int
    offset: int
    indices: list[int]
    num_samples: int
    repeats: int = 1

    def __str__(self) -> str:
        more = len(self.indices) - _MOST_NAMED
        shown = ", ".join(map(str, self.indices[:_MOST_NAMED]))
        named = f"[{shown}]" if more <= 0 else f"[{shown}] and {more} more"
        return f"the samples {named} (from offset {self.offset} of epoch {self.epoch})"


class Fetcher:
    """Makes microbatches of a map-style data set."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Batch],
        seed: int,
        isolate_random: bool,
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self._isolate_random = isolate_random
        self._epoch: int | None = None
        self._fetched = 0.0
        """The time at which the samples were there, and were to be collated."""

    def __call__(self, request: MicrobatchRequest) -> Microbatch:
        """Fetch a microbatch. Raises `DataFailed`, caused by the original exception."""
        if not self._isolate_random:
            return self._microbatch(request, self._plain)
        with generators_kept():
            return self._microbatch(request, self._isolated)

    def in_worker(self, request: MicrobatchRequest) -> Microbatch:
        """Fetch a microbatch in a worker, whose generators are seeded here and not restored."""
        if self._isolate_random:
            return self._microbatch(request, self._isolated)
        seed_generators(mix(self._seed, request.epoch, request.offset))
        return self._microbatch(request, self._plain)

    def _microbatch(
        self, request: MicrobatchRequest, fetch: Callable[[MicrobatchRequest], Batch]
    ) -> Microbatch:
        try:
            if request.epoch != self._epoch:  # each worker has a copy of the data set
                set_epoch(self._dataset, request.epoch)
                self._epoch = request.epoch
            began = time.perf_counter()
            batch = fetch(request)
            seconds = self._fetched - began, time.perf_counter() - self._fetched
            return Microbatch(batch, request.num_samples, request.offset, request.repeats, seconds)
        except (Exception, SystemExit) as error:
            absent, why = self._absent(request, error), last_line(error)
            raise DataFailed(f"{absent}{request} could not be fetched: {why}") from error

    def _plain(self, request: MicrobatchRequest) -> Batch:
        fetch_many = getattr(self._dataset, "__getitems__", None)
        if fetch_many is not None:
            samples = fetch_many(request.indices)
        else:
            samples = [self._dataset[index] for index in request.indices]
        self._fetched = time.perf_counter()
        return self._collate(samples * request.repeats if request.repeats > 1 else samples)

    def _isolated(self, request: MicrobatchRequest) -> Batch:
        seed, epoch, first = self._seed, request.epoch, request.offset
        samples = []
        for offset, index in enumerate(request.indices, first):
            seed_generators(mix(seed, epoch, offset))
            samples.append(self._dataset[index])
        seed_generators(mix(seed, epoch, first, COLLATE))
        self._fetched = time.perf_counter()
        return self._collate(samples * request.repeats)

    def _absent(self, request: MicrobatchRequest, error: BaseException) -> str:
        """Name the first sample that is None, which torch's collate function does not accept, if
        the error may come from it."""
        if isinstance(error, TypeError) and "NoneType" in str(error):
            with suppress(Exception):  # the data set is read once more
                for index in request.indices:
                    if self._dataset[index] is None:
                        return f"sample {index} is None: does its __getitem__ return it? So "
        return ""


class _Failure(NamedTuple):
    """An error that a worker sends in place of a result, as text: some exceptions cannot be
    pickled."""

    kind: type[DrivetrainError]
    message: str

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        if isinstance(error, DrivetrainError) and not isinstance(error, DataFailed):
            return cls(type(error), str(error))
        raised = error.__cause__ if isinstance(error, DataFailed) and error.__cause__ else error
        message = str(error) if isinstance(error, DataFailed) else last_line(error)
        return cls(WorkerFailed, f"in a data worker: {message}\n{user_frames(raised)}")


class _FetcherInWorker:
    """The `DataLoader`'s data set in workers, whose indices are requests."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def __getitem__(self, request: MicrobatchRequest) -> Microbatch | _Failure:
        try:
            return self._fetcher.in_worker(request)
        except (DataFailed, KeyboardInterrupt) as error:  # handled by the training process
            return _Failure.of(error)


class _StreamInWorker(IterableDataset[Any]):
    """The `DataLoader`'s data set where one worker reads a stream."""

    def __init__(self, read: Callable[[], Iterator[Any]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._read()
        except (Exception, SystemExit) as error:
            yield _Failure.of(error)


def from_workers(
    fetcher: Fetcher,
    requests: Iterator[MicrobatchRequest],
    num_workers: int,
    prefetch: int,
    start_method: str | None,
) -> Generator[Microbatch, None, None]:
    """Yield the microbatches of `requests`, in order, from workers that live as long as this
    generator. Raises `WorkerFailed` if a worker raises or dies.
    """
    outstanding: deque[MicrobatchRequest] = deque()
    num_received = 0

    def sent() -> Iterator[MicrobatchRequest]:
        for request in requests:
            outstanding.append(request)
            yield request

    def describe_work(worker: int) -> str:
        """Describe a worker's current request and its next ones: requests are sent to the workers
        in turn."""
        numbered = enumerate(outstanding, num_received)
        own = [str(request) for number, request in numbered if number % num_workers == worker]
        return f", which was to fetch {', then '.join(own)}," if own else ""

    received: Generator[Microbatch, None, None] = _receive(
        _FetcherInWorker(fetcher), sent(), num_workers, prefetch, start_method, describe_work
    )
    with closing(received):
        for microbatch in received:
            outstanding.popleft()
            num_received += 1
            yield microbatch


def from_one_worker(
    read: Callable[[], Iterator[T]], prefetch: int, start_method: str | None
) -> Generator[T, None, None]:
    """Yield the results of `read()` from a worker that lives as long as this generator. Raises
    `WorkerFailed` if the worker raises or dies."""
    return _receive(_StreamInWorker(read), None, 1, prefetch, start_method, lambda worker: "")


def _receive(
    worker_side: Any,
    requests: Iterator[MicrobatchRequest] | None,
    num_workers: int,
    prefetch: int,
    start_method: str | None,
    describe_work: Callable[[int], str],
) -> Generator[Any, None, None]:
    keep_socket_paths_short()
    context = context_of(start_method)
    loader: DataLoader[Any] = DataLoader(
        worker_side,
        sampler=requests,
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=num_workers,
        prefetch_factor=prefetch,
        multiprocessing_context=context,
        # Without a generator the DataLoader would draw from the process's own.
        generator=torch.Generator(),
        worker_init_fn=functools.partial(_begin_worker, _parent_of_workers(context)),
    )
    # The handler that the DataLoader installs raises the death of a worker wherever the main
    # thread happens to be, even in the middle of a save. Without it, the death is noticed below.
    with _sigchld_handler_kept(), blocked():
        iterator: Any = iter(loader)
    try:
        detach_death_handler(iterator)
        notice_torn_results(iterator)
        while True:
            try:
                result = next(iterator)
            except StopIteration:
                return
            except Exception as error:
                died = [
                    f"{worker.pid} (exit code {worker.exitcode}){describe_work(number)}"
                    for number, worker in ended(iterator._workers)
                ]
                raise WorkerFailed(
                    f"data worker {' '.join(died) or 'communication'} failed: {last_line(error)}. "
                    "Exit code -9 is often the kernel out of memory: use fewer workers; 0 is code "
                    "that ended it (os._exit)"
                ) from error
            if isinstance(result, _Failure):
                raise result.kind(result.message)
            yield result
    finally:
        # Not left to `__del__`: a traceback may keep the iterator alive.
        iterator._shutdown_workers()


def _parent_of_workers(context: BaseContext) -> int | None:
    """Return the number of this process, which workers watch; None for a fork server, which is
    their parent."""
    return None if context.get_start_method() == "forkserver" else os.getpid()


def _begin_worker(parent: int | None, worker: int) -> None:
    """Prepare a worker. It ends with the training process, whatever it is doing, and leaves stop
    signals to that process. A worker that another signal kills prints its stacks, since torch's own
    handler only reports the signal."""
    leave_to_parent()
    end_with_parent(f"data worker {worker}: the process that trains", parent or os.getppid())
    faulthandler.disable()  # a fork inherits it as enabled
    with suppress(AttributeError, OSError, ValueError):  # stderr may not be a file
        faulthandler.enable()


def _unchanged(result: Any) -> Any:
    return result


@contextmanager
def _sigchld_handler_kept() -> Iterator[None]:
    on_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if on_main_thread and handler is not None:
            signal.signal(signal.SIGCHLD, handler)

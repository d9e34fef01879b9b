"""Fetches and collates microbatches, in this process or in workers."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import threading
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
from .killed_workers import context_of, ended, notice_torn_results
from .order import mix
from .parent import end_with_parent
from .random_state import generators_kept, seed_generators
from .user_frames import last_line, user_frames

__all__ = [
    "COLLATE",
    "Fetcher",
    "MicrobatchRequest",
    "from_one_worker",
    "from_workers",
]


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
        return f"the samples {self.indices} (from offset {self.offset} of epoch {self.epoch})"


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

    def __call__(self, request: MicrobatchRequest) -> Microbatch:
        """Raises `DataFailed`, caused by the original exception, when that fails."""
        if not self._isolate_random:
            return self._microbatch(request, self._plain)
        with generators_kept():
            return self._microbatch(request, self._isolated)

    def in_worker(self, request: MicrobatchRequest) -> Microbatch:
        """The same, where the generators are a worker's own: seeded here, and not kept."""
        if self._isolate_random:
            return self._microbatch(request, self._isolated)
        seed_generators(mix(self._seed, request.epoch, request.offset))
        return self._microbatch(request, self._plain)

    def _microbatch(
        self, request: MicrobatchRequest, fetch: Callable[[MicrobatchRequest], Batch]
    ) -> Microbatch:
        try:
            batch = fetch(request)
            return Microbatch(batch, request.num_samples, request.offset, request.repeats)
        except (Exception, SystemExit) as error:
            raise DataFailed(f"{request} could not be fetched: {last_line(error)}") from error

    def _plain(self, request: MicrobatchRequest) -> Batch:
        fetch_many = getattr(self._dataset, "__getitems__", None)
        if fetch_many is not None:
            samples = fetch_many(request.indices)
        else:
            samples = [self._dataset[index] for index in request.indices]
        return self._collate(samples * request.repeats if request.repeats > 1 else samples)

    def _isolated(self, request: MicrobatchRequest) -> Batch:
        seed, epoch, first = self._seed, request.epoch, request.offset
        samples = []
        for offset, index in enumerate(request.indices, first):
            seed_generators(mix(seed, epoch, offset))
            samples.append(self._dataset[index])
        seed_generators(mix(seed, epoch, first, COLLATE))
        return self._collate(samples * request.repeats)


class _Failure(NamedTuple):
    """An error as a worker sends it in place of a result: some exceptions cannot be pickled."""

    kind: type[DrivetrainError]
    message: str

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        if isinstance(error, DrivetrainError) and not isinstance(error, DataFailed):
            return cls(type(error), str(error))
        raised = error.__cause__ if isinstance(error, DataFailed) and error.__cause__ else error
        told = str(error) if isinstance(error, DataFailed) else last_line(error)
        return cls(WorkerFailed, f"in a data worker: {told}\n{user_frames(raised)}")


class _WorkerSide:
    """The `DataLoader`'s data set in workers that get requests for indices."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def __getitem__(self, request: MicrobatchRequest) -> Microbatch | _Failure:
        try:
            return self._fetcher.in_worker(request)
        except (DataFailed, KeyboardInterrupt) as error:  # the process that trains is interrupted
            return _Failure.of(error)


class _OneWorkerSide(IterableDataset[Any]):
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
    """The microbatches of `requests`, in order, from one set of workers that lives as long as this
    generator. Raises `WorkerFailed` when one raises or dies.
    """
    under_way: deque[MicrobatchRequest] = deque()
    num_received = 0

    def sent() -> Iterator[MicrobatchRequest]:
        for request in requests:
            under_way.append(request)
            yield request

    def work_of(worker: int) -> str:
        """The request that a worker was working on, and the next ones: requests are handed out
        in turn."""
        numbered = enumerate(under_way, num_received)
        own = [str(request) for number, request in numbered if number % num_workers == worker]
        return f", which was to fetch {', then '.join(own)}," if own else ""

    received: Generator[Microbatch, None, None] = _receive(
        _WorkerSide(fetcher), sent(), num_workers, prefetch, start_method, work_of
    )
    with closing(received):
        for microbatch in received:
            under_way.popleft()
            num_received += 1
            yield microbatch


def from_one_worker(
    read: Callable[[], Iterator[T]], prefetch: int, start_method: str | None
) -> Generator[T, None, None]:
    """Yields the results of `read()` in a worker that lives as long as this generator. Raises
    `WorkerFailed` when it raises or dies."""
    return _receive(_OneWorkerSide(read), None, 1, prefetch, start_method, lambda worker: "")


def _receive(
    worker_side: Any,
    requests: Iterator[MicrobatchRequest] | None,
    num_workers: int,
    prefetch: int,
    start_method: str | None,
    work_of: Callable[[int], str],
) -> Generator[Any, None, None]:
    context = context_of(start_method)
    loader: DataLoader[Any] = DataLoader(
        worker_side,
        sampler=requests,
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=num_workers,
        prefetch_factor=prefetch,
        multiprocessing_context=context,
        # Unless it is given one, it draws from the process's own generator.
        generator=torch.Generator(),
        worker_init_fn=functools.partial(_begin_worker, _parent_of_workers(context)),
    )
    # The handler that the DataLoader installs raises the death of a worker wherever the main
    # thread happens to be, even in the middle of a save. Without it, the death is noticed below.
    with _sigchld_handler_kept():
        iterator: Any = iter(loader)
    notice_torn_results(iterator)
    try:
        while True:
            try:
                result = next(iterator)
            except StopIteration:
                return
            except Exception as error:
                died = [
                    f"{worker.pid} (exit code {worker.exitcode}){work_of(number)}"
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
    """This process, which a worker cannot ask for once it is gone; None: a server that forks."""
    return None if context.get_start_method() == "forkserver" else os.getpid()


def _begin_worker(parent: int | None, worker: int) -> None:
    """A worker ends with the process that trains, whatever it is doing. One that a signal kills
    prints its stacks: torch's own handler says no more than that there was one."""
    end_with_parent(f"data worker {worker}: the process that trains", parent or os.getppid())
    faulthandler.disable()  # a fork takes it over as enabled, though torch's handler replaced it
    with suppress(AttributeError, OSError, ValueError):  # stderr may be no file
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

"""Calls to other ranks: keeps their tensors alive, and names calls and ranks in errors."""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import lost_ranks
from ...kernel import errors
from ...kernel.errors import CheckpointError, CollectiveFailed
from ..common import models
from . import stall_watch, used_layers
from .start import served_by_rank_0


class _Naming(AbstractContextManager[None]):
    """Turns the errors that `is_meant` picks into `CollectiveFailed`. It is a class, since a step
    enters it a few times, and a generator takes three times as long.
    """

    __slots__ = (
        "_before",
        "_began",
        "_call",
        "_counts_idle",
        "_inside",
        "_is_meant",
        "_mixed",
        "_patient",
        "_rank",
        "_watch",
    )

    def __init__(
        self,
        call: str,
        rank: int,
        patient: bool,
        is_meant: Callable[[BaseException], bool],
        inside: AbstractContextManager[Any] = models.NO_CONTEXT,
        mixed: bool = True,
        counts_idle: bool = False,
    ) -> None:
        self._counts_idle = counts_idle
        self._call, self._rank, self._is_meant = call, rank, is_meant
        self._patient, self._mixed = patient, mixed
        self._inside = None if inside is models.NO_CONTEXT else inside
        self._watch = stall_watch.this_session()

    def __enter__(self) -> None:
        if self._watch is not None:
            self._before = self._watch.enter(self._call, self._patient, self._mixed)
            if self._counts_idle:
                self._began = self._watch.waits.begin_work()
        if self._inside is not None:
            self._inside.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._inside is not None:
            self._inside.__exit__(kind, error, trace)
        if self._watch is not None:
            self._watch.leave(self._before)
            if self._counts_idle:
                self._watch.waits.end_work(*self._began)
        if error is not None and self._is_meant(error):
            raise _collective_failed(self._call, self._rank, error) from error


def naming_call(call: str, rank: int, patient: bool = False) -> AbstractContextManager[None]:
    """Name a call that only communicates with other ranks. `patient`: they may idle meanwhile."""
    return _Naming(call, rank, patient, _is_any, mixed=False)


def _is_any(error: BaseException) -> bool:
    return isinstance(error, (RuntimeError, ValueError))


def naming_collectives(
    call: str,
    rank: int,
    patient: bool = False,
    inside: AbstractContextManager[Any] = models.NO_CONTEXT,
    counts_idle: bool = False,
) -> AbstractContextManager[None]:
    """Name work that also communicates with other ranks. Failures of collectives become
    `CollectiveFailed`; other errors are unchanged. `inside`: a context to enter, too.
    `counts_idle`: this thread computes by itself, and its idle time is spent on waiting for others.
    """
    return _Naming(call, rank, patient, _is_of_a_collective, inside, counts_idle=counts_idle)


def _is_of_a_collective(error: BaseException) -> bool:
    """Return True for an error of a collective. gloo reports a lost peer as a RuntimeError."""
    if not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)


def _collective_failed(call: str, rank: int, error: BaseException) -> CollectiveFailed:
    """Return the error that names the rank and the call, and the ranks to blame."""
    stall_watch.broken.append(call)
    if lost_ranks.await_new():
        names = _listed(lost_ranks.newly_lost())
        return CollectiveFailed(f"rank {rank}: {call} failed: ranks that died: {names}")
    blamed, missing = stall_watch.verdict()
    if blamed:
        time.sleep(_TOGETHER_SECONDS)  # the rank that ends the run reports first
    else:
        missing, gone = _missing_ranks(rank)
        if gone:
            blamed = f"this rank arrived late, after others had stopped waiting ({_listed(gone)})"
        elif missing:
            blamed = f"ranks that did not arrive: {_listed(missing)}"
    first = str(error).strip().splitlines()[0].rstrip(".")
    if used := used_layers.describe_difference():
        blamed = f"{blamed}{'. ' if blamed else ''}{used}"
    return CollectiveFailed(
        f"rank {rank} on {socket.gethostname()}: {call} failed: {first}. "
        f"{blamed[:1].upper()}{blamed[1:]}{'. ' if blamed else ''}Look at the output of those "
        "ranks first; `--resume auto` continues from the newest checkpoint",
        tuple(missing),
        _flight_records(),
    )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _flight_records() -> str:
    """Return the communication libraries' records of their last calls, if this torch has any."""
    library, found = torch._C._distributed_c10d, {}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with suppress(AttributeError, RuntimeError, ValueError, TypeError):
            records = json.loads(getattr(library, name)())
            if records.get("entries"):
                found[name.strip("_").removeprefix("dump_")] = records
    return json.dumps(found, indent=1) if found else ""


_TOGETHER_SECONDS = 3.0
"""Time within which all ranks notice that a call has failed."""
_ANSWER_LIMIT = timedelta(seconds=10)
"""Limit for the store to answer after a call has failed. A lower limit of collectives is for ranks
that do not come, and a busy machine may answer later."""


def _missing_ranks(rank: int) -> tuple[list[int], list[int]]:
    """Return the ranks that do not report a failed collective within a few seconds, and the ranks
    that reported one long before this rank.
    """
    if not dist.is_initialized():
        return [], []
    store, keys = default_store(), [f"drivetrain/failed/{r}" for r in range(dist.get_world_size())]
    others = [other for other in range(len(keys)) if other != rank]
    limit = store.timeout
    store.set_timeout(max(limit, _ANSWER_LIMIT))
    try:
        failed = {o: float(store.get(keys[o])) for o in others if store.check([keys[o]])}
        now = time.time()
        store.set(keys[rank], str(now))
        gone = [other for other, then in failed.items() if now - then > _TOGETHER_SECONDS]
        with suppress(RuntimeError):  # out of time
            store.wait(keys, timedelta(seconds=_TOGETHER_SECONDS))
        return [other for other in others if not store.check([keys[other]])], gone
    except RuntimeError:  # the store's own process is gone
        return ([0] if rank and served_by_rank_0() else []), []
    finally:
        store.set_timeout(limit)


@contextmanager
def refusing_together(rank: int, size: int) -> Iterator[None]:
    """Raise an error of reading a checkpoint on all ranks, so that none continues alone. The block
    may not change anything yet, since data that other ranks have read is dropped.
    """
    refusal: CheckpointError | None = None
    try:
        yield
    except CheckpointError as error:
        refusal = error
    with naming_collectives("agreeing that the checkpoint can be read", rank, patient=True):
        first = keep_for_a_while(torch.tensor([size if refusal is None else rank]))
        dist.all_reduce(first, dist.ReduceOp.MIN)
        if int(first) == size:
            return
        encoded = json.dumps([type(refusal).__name__, str(refusal)]).encode()
        length = keep_for_a_while(torch.tensor([len(encoded)]))
        dist.broadcast(length, src=int(first))
        text = torch.zeros(int(length), dtype=torch.uint8)
        if int(first) == rank:
            text = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        dist.broadcast(keep_for_a_while(text), src=int(first))
    if refusal is not None:
        raise refusal
    name, message = json.loads(bytes(text.tolist()))
    raise getattr(errors, name)(f"rank {int(first)}: {message}")


def ranks_exist() -> bool:
    """Return False if the other ranks of the process group exist in name alone, as with torch's
    backend `fake`: there is nobody to watch, and nothing to compare."""
    return bool(dist.get_backend() != "fake")


def default_store() -> Any:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


_recent: deque[Tensor] = deque(maxlen=64)


def keep_for_a_while(tensor: Tensor) -> Tensor:
    """Keep a tensor alive that a collective on the host is given from Python.

    A thread of gloo that frees the last reference to such a tensor waits for the interpreter. The
    interpreter waits for this thread while it takes the process group down: a deadlock. Delete when
    torch 2.8 is no longer supported.
    """
    if tensor.nbytes < 2**20 and type(tensor) is Tensor:  # others have no elements to send
        _recent.append(tensor)
    return tensor

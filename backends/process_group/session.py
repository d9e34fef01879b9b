"""A session over torch.distributed, for every driver whose ranks form a process group."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from ...kernel import errors
from ...kernel.contract import Engine, World
from ...kernel.errors import BackendUnavailable, CheckpointError, CollectiveFailed
from ...kernel.plan import Plan, Probe
from ...kernel.recipe import Batch, Recipe
from ..common import fork_gc, layouts, models, prefetch, random_state
from . import shm_tally, stall_watch


@contextmanager
def process_group(plan: Plan, device: torch.device) -> Iterator[World]:
    """The ranks that the launcher started (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or this
    process alone, each of which watches the others; taken down again unless it was there before.

    Host tensors go over gloo, device tensors over the device's own library.
    """
    fork_gc.leave_the_parents_garbage()
    if dist.is_initialized():  # with the limit of whoever made it
        _set_limit(_limit(plan))
    with nullcontext() if dist.is_initialized() else joined_ranks(plan, device):
        rank, size, store = dist.get_rank(), dist.get_world_size(), _store()
        stall, timeout = plan.stall_seconds, plan.timeout_seconds
        with stall_watch.watching(store, rank, size, stall, timeout):
            yield World(rank, size, device, feeder_index=rank, num_feeders=size)


@contextmanager
def joined_ranks(plan: Plan, device: torch.device) -> Iterator[None]:
    """The process group alone."""
    backend = "gloo" if device.type == "cpu" else None  # None: gloo for cpu, nccl for cuda
    timeout = _limit(plan)
    with _naming("joining the process group", int(os.environ.get("RANK", "0"))):
        store, rank, size = _meeting_place(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        yield
        _leave_together(size)
    finally:
        dist.destroy_process_group()


def _limit(plan: Plan) -> timedelta:
    """Of a collective. Where ranks are watched, the watch ends what takes too long, and knows who
    is late."""
    grace = 0.0 if plan.stall_seconds is None else 2 * stall_watch.GRACE_SECONDS
    return timedelta(seconds=plan.timeout_seconds + grace)


def _set_limit(limit: timedelta) -> None:
    """For the process group that there is."""
    # the public name came with torch 2.15; delete the other when 2.14 is no longer supported
    own = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    own(limit)


def _leave_together(size: int) -> None:
    """Wait until no rank is inside a collective: to hang up on one that is still reading its
    answer would make it fail."""
    store = _store()
    with suppress(RuntimeError):  # who has seen all arrive may be gone, and the store with it
        if store.add("drivetrain/leaving", 1) == size:
            store.set("drivetrain/all left", "1")
        store.wait(["drivetrain/all left"], timedelta(seconds=30))


_stores: dict[tuple[str, str], tuple[Any, int, int]] = {}
_num_sessions: Counter[tuple[str, str]] = Counter()


def _meeting_place(timeout: timedelta) -> tuple[Any, int, int]:
    """A fresh store for one session, with this rank and the number of ranks; without a launcher
    this process is alone.

    All sessions of a launch share one server. Were each to open its own at the launcher's port, a
    rank that is ahead would meet at the last one, which a rank that is behind has yet to close.
    """
    if "WORLD_SIZE" not in os.environ:
        return dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    address = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if address not in _stores:
        _stores.clear()  # of an earlier launch, as tests do many in one process
        _num_sessions.clear()
        _stores[address] = next(rendezvous("env://", timeout=timeout))
    store, rank, size = _stores[address]
    store.set_timeout(timeout)
    _num_sessions[address] += 1
    prefix = f"session {_num_sessions[address]}"
    return dist.PrefixStore(prefix, store), rank, size  # type: ignore[attr-defined]


def local_rank() -> int:
    """Which of this machine's processes this is."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def choose_device(choice: str) -> torch.device:
    """`cpu`, or this process's GPU; `auto` takes the GPU where there is any.

    Raises `BackendUnavailable` when this machine has fewer GPUs than local ranks.
    """
    num_gpus = torch.cuda.device_count()
    if choice == "cpu" or (choice == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if local_rank() >= num_gpus:
        raise BackendUnavailable(
            f"local rank {local_rank()} has no GPU: this machine shows {num_gpus}. Start at most "
            "that many processes here, or set backend.device=cpu"
        )
    return torch.device("cuda", local_rank())


class _Naming(AbstractContextManager[None]):
    """Makes `CollectiveFailed` of the errors that `is_meant` picks. A class, since it is entered a
    few times in a step, and a generator takes three times as long."""

    __slots__ = ("_call", "_inside", "_is_meant", "_rank", "_waiting")

    def __init__(
        self,
        call: str,
        rank: int,
        patient: bool,
        is_meant: Callable[[BaseException], bool],
        inside: AbstractContextManager[Any] = models.NO_CONTEXT,
        mixed: bool = True,
    ) -> None:
        self._call, self._rank, self._is_meant, self._inside = call, rank, is_meant, inside
        self._waiting = stall_watch.waiting(call, patient, mixed)

    def __enter__(self) -> None:
        self._waiting.__enter__()
        self._inside.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._inside.__exit__(kind, error, trace)
        self._waiting.__exit__(kind, error, trace)
        if error is not None and self._is_meant(error):
            raise _collective_failed(self._call, self._rank, error) from error


def _naming(call: str, rank: int, patient: bool = False) -> AbstractContextManager[None]:
    """Around a call that does nothing but talk to other ranks; `patient`: they may idle."""
    return _Naming(call, rank, patient, _is_any, mixed=False)


def _is_any(error: BaseException) -> bool:
    return isinstance(error, (RuntimeError, ValueError))


def naming_collectives(
    call: str,
    rank: int,
    patient: bool = False,
    inside: AbstractContextManager[Any] = models.NO_CONTEXT,
) -> AbstractContextManager[None]:
    """Around work that also talks to other ranks: failures of that become `CollectiveFailed`, all
    others stay as they are. `inside`: entered too.
    """
    return _Naming(call, rank, patient, _is_of_a_collective, inside)


def _is_of_a_collective(error: BaseException) -> bool:
    """gloo reports a peer that is gone as a plain RuntimeError."""
    if not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)


def _collective_failed(call: str, rank: int, error: BaseException) -> CollectiveFailed:
    """The error that names the rank and the call, and the ranks that are to blame."""
    blamed, missing = stall_watch.verdict()
    if not blamed:
        missing, gone = _missing_ranks(rank)
        if gone:
            blamed = f"this rank came late: others had given up waiting ({_listed(gone)})"
        elif missing:
            blamed = f"ranks that did not arrive: {_listed(missing)}"
    first = str(error).strip().splitlines()[0].rstrip(".")
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
    """What the libraries noted of their last calls; each kind of records that this torch has."""
    library, found = torch._C._distributed_c10d, {}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with suppress(AttributeError, RuntimeError, ValueError, TypeError):
            records = json.loads(getattr(library, name)())
            if records.get("entries"):
                found[name.strip("_").removeprefix("dump_")] = records
    return json.dumps(found, indent=1) if found else ""


_TOGETHER_SECONDS = 3.0
"""Within which all ranks notice that a call has failed."""


def _missing_ranks(rank: int) -> tuple[list[int], list[int]]:
    """Ranks that do not report a failed collective within a few seconds; and those that did long
    before this one."""
    if not dist.is_initialized():
        return [], []
    store, keys = _store(), [f"drivetrain/failed/{r}" for r in range(dist.get_world_size())]
    others = [other for other in range(len(keys)) if other != rank]
    try:
        told = {o: float(store.get(keys[o])) for o in others if store.check([keys[o]])}
        now = time.time()
        store.set(keys[rank], str(now))
        gone = [other for other, then in told.items() if now - then > _TOGETHER_SECONDS]
        with suppress(RuntimeError):  # out of time
            store.wait(keys, timedelta(seconds=_TOGETHER_SECONDS))
        return [other for other in others if not store.check([keys[other]])], gone
    except RuntimeError:
        return [], []  # the store's own process is gone


@contextmanager
def refusing_together(rank: int, size: int) -> Iterator[None]:
    """Around what reads a checkpoint: an error of one rank's part is raised on all of them, so that
    none goes on alone. Before anything is changed, since what others have read is dropped."""
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
        told = json.dumps([type(refusal).__name__, str(refusal)]).encode()
        length = keep_for_a_while(torch.tensor([len(told)]))
        dist.broadcast(length, src=int(first))
        text = torch.zeros(int(length), dtype=torch.uint8)
        if int(first) == rank:
            text = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        dist.broadcast(keep_for_a_while(text), src=int(first))
    if refusal is not None:
        raise refusal
    name, message = json.loads(bytes(text.tolist()))
    raise getattr(errors, name)(f"rank {int(first)}: {message}")


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def probe_devices(preference: int, **versions: str) -> Probe:
    """The probe of a driver that runs on CUDA where there is any, else on the host."""
    if not dist.is_available():
        return Probe(False, "this build of torch has no torch.distributed", "pip install torch")
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return Probe(
        usable=True,
        reason=f"NCCL on {len(gpus)} GPUs" if gpus else "gloo on the CPU",
        versions={"torch": torch.__version__, **versions},
        devices=tuple(gpu.name for gpu in gpus) or ("cpu",),
        memory_bytes=sum(gpu.total_memory for gpu in gpus) or layouts.host_memory(),
        preference=preference,
    )


def num_launched() -> int:
    """How many ranks the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


_recent: deque[Tensor] = deque(maxlen=64)


def keep_for_a_while(tensor: Tensor) -> Tensor:
    """Call it on each tensor that a collective on the host is given from Python.

    A thread of gloo that frees the last reference to such a tensor waits for the interpreter,
    which waits for the thread while it takes the process group down, for ever. Delete when torch
    2.8 is no longer supported.
    """
    if tensor.nbytes < 2**20:
        _recent.append(tensor)
    return tensor


def _add_up(values: Sequence[float]) -> Callable[[], list[float]]:
    """Begin to; the answer waits for the sums over ranks."""
    sums = keep_for_a_while(torch.tensor(values, dtype=torch.float64))
    work = dist.all_reduce(sums, async_op=True)
    assert work is not None

    def wait() -> list[float]:
        work.wait()
        return sums.tolist()

    return wait


class ProcessGroupSession:
    """`Session` over the default process group; `build` makes the driver's own engine."""

    def __init__(
        self, plan: Plan, world: World, build: Callable[[Recipe, Plan, World], Engine]
    ) -> None:
        self.plan, self.world, self._build = plan, world, build
        self._device = world.device
        self._board: shm_tally.SharedMemorySum | None = None
        self._board_opened = False

    def watch(self, tell: Callable[[int, float, str], None]) -> None:
        stall_watch.listen(lambda late: tell(late.rank, late.seconds, str(late)))

    def seed(self, value: int) -> None:
        random_state.seed_all(value)

    def prepare(self, recipe: Recipe) -> Engine:
        with naming_collectives("preparing the model", self.world.rank, patient=True):
            return self._build(recipe, self.plan, self.world)

    def feed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return prefetch.feed(batches, self._device)

    def tally(self, values: Sequence[float]) -> Callable[[], list[float]]:
        if self.world.size == 1:
            return lambda: list(values)
        stall_watch.count_step()
        board = self._shared_board() if len(values) <= shm_tally.MOST else None
        begin = _add_up if board is None else board.show
        with self._named("starting to add up the step's counts"):
            sums = begin(values)

        def wait() -> list[float]:
            with self._named("adding up the step's counts"):
                return sums()

        return wait

    def _shared_board(self) -> shm_tally.SharedMemorySum | None:
        """Opened by the first tally, which all ranks begin."""
        if not self._board_opened:
            world, timeout = self.world, self.plan.timeout_seconds
            timeout += 0.0 if self.plan.stall_seconds is None else 2 * stall_watch.GRACE_SECONDS
            self._board = shm_tally.opened(world.rank, world.size, timeout, self.exchange)
            self._board_opened = True
        return self._board

    def exchange(self, value: Any) -> list[Any]:
        encoded = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        parts = self._gather(encoded, "exchanging values", patient=True)
        return [json.loads(bytes(part.tolist())) for part in parts]

    def reduce(self, tensor: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
        result = keep_for_a_while(tensor.detach().clone())
        with self._named(f"reducing a tensor of shape {tuple(tensor.shape)}"):
            dist.all_reduce(result, _OPS[op])
        return result

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._gather(tensor.detach().cpu(), "gathering a tensor"))

    def _gather(self, tensor: Tensor, call: str, patient: bool = False) -> list[Tensor]:
        """Host tensors of uneven length: lengths first, then parts of the longest length."""
        with self._named(call, patient):
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world.size)]
            dist.all_gather(lengths, keep_for_a_while(torch.tensor([len(tensor)])))
            longest = max(int(length) for length in lengths)
            mine = tensor.new_zeros((longest, *tensor.shape[1:]))
            mine[: len(tensor)] = tensor
            parts = [torch.empty_like(mine) for _ in lengths]
            dist.all_gather(parts, keep_for_a_while(mine))
            for kept in (*lengths, *parts):
                keep_for_a_while(kept)
        return [part[: int(length)] for part, length in zip(parts, lengths, strict=True)]

    def rng_state(self) -> dict[str, Tensor]:
        return random_state.rng_state(self._device)

    def set_rng_state(self, state: Mapping[str, Tensor]) -> None:
        random_state.set_rng_state(self._device, state)

    def _named(self, call: str, patient: bool = False) -> AbstractContextManager[None]:
        return _naming(call, self.world.rank, patient)

"""A session over torch.distributed, for every driver whose ranks form a process group."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from ...data.random_state import seed_generators
from ...kernel.contract import Engine, World
from ...kernel.errors import SettingError
from ...kernel.plan import Plan
from ...kernel.recipe import Batch, Recipe
from ...launched import rank as launched_rank
from ...launched import world_size
from ...lost_ranks import generation, is_new, listen
from ..common import fork_gc, prefetch, random_state
from ..common.accelerators import facts_of
from . import shm_tally, stall_watch, used_layers
from .collectives import (
    default_store,
    keep_for_a_while,
    naming_call,
    naming_collectives,
    ranks_exist,
)
from .connections import Connections
from .start import (
    CONNECT_LIMIT,
    await_ranks,
    await_server,
    late_store_named,
    lost_store_named,
)


@contextmanager
def process_group(
    plan: Plan,
    device: torch.device,
    destroy: Callable[[], None] = dist.destroy_process_group,
) -> Iterator[World]:
    """Join the ranks that the launcher started (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or
    this process alone. Ranks watch each other. `destroy` takes the process group down, unless it
    existed before.

    Host tensors go over gloo, device tensors over the device's own library.
    """
    sums_on = facts_of(device.type).sums_on
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    fork_gc.leave_the_parents_garbage()
    if dist.is_initialized():  # with the time limit of its creator
        _set_limit(_limit(plan))
        ranks = _given_ranks(destroy)
    else:
        ranks = _joined_ranks(plan, device, destroy)
    with ranks:
        rank, size, store = dist.get_rank(), dist.get_world_size(), default_store()
        watched = stall_watch.watching(store, rank, size, plan.stall_seconds, plan.timeout_seconds)
        with ExitStack() as stack:
            if ranks_exist():
                with naming_call("connecting to the store", rank):
                    stack.enter_context(watched)
            yield World(rank, size, device, feeder_index=rank, num_feeders=size, sums_on=sums_on)


@contextmanager
def _given_ranks(destroy: Callable[[], None]) -> Iterator[None]:
    """Take the process group that exists, and leave it, unless its ranks do not exist."""
    in_name_alone = not ranks_exist()
    try:
        yield
    finally:
        if in_name_alone:
            destroy()


@contextmanager
def _joined_ranks(plan: Plan, device: torch.device, destroy: Callable[[], None]) -> Iterator[None]:
    """Create the process group; destroy it at the end. Ranks are watched while they join."""
    backend = facts_of("cpu").collectives
    if device.type != "cpu":  # by default torch takes the device's library alone
        backend = f"cpu:{backend},{device.type}:{facts_of(device.type).collectives}"
    timeout = _limit(plan)
    listen()
    stall, seconds = plan.stall_seconds, plan.timeout_seconds
    call, own = "joining the process group", launched_rank()
    with naming_call(call, own), late_store_named(call, own, stall):
        store, rank, size = _open_store(timeout, seconds)
    stall_watch.broken.clear()
    watched = stall_watch.watching(store, rank, size, stall, seconds, joins=True)
    with watched, naming_call(call, rank), lost_store_named(store):
        await_ranks(store, "start", rank, size, timeout.total_seconds())
        with Connections() as connections:
            store = connections.store(store)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timeout
            )
        # else a rank that fails at once would disconnect from one that is still connecting
        await_ranks(store, "joined", rank, size, timeout.total_seconds())
    try:
        with connections.closed_on_loss():
            yield
            if not (stall_watch.broken or is_new()):
                _leave_together(size)
    finally:
        destroy()


def _limit(plan: Plan) -> timedelta:
    """Return the time limit of a collective. If ranks are watched, it is longer than
    `timeout_seconds`: the watch ends calls that take too long, since it knows which rank is late.
    """
    grace = 0.0 if plan.stall_seconds is None else 2 * stall_watch.GRACE_SECONDS
    return timedelta(seconds=plan.timeout_seconds + grace)


def _set_limit(limit: timedelta) -> None:
    """Set the time limit of the existing process group."""
    # the public name came with torch 2.15; delete the other when 2.14 is no longer supported
    own = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    own(limit)


def _leave_together(size: int) -> None:
    """Wait until no rank is inside a collective. To disconnect from a rank that is still reading
    its answer would make its call fail.
    """
    store = default_store()
    with suppress(RuntimeError):  # a rank that saw all arrive may be gone, and the store with it
        if store.add("drivetrain/leaving", 1) == size:
            store.set("drivetrain/all left", "1")
        store.wait(["drivetrain/all left"], timedelta(seconds=30))


_stores: dict[tuple[str, str], Any] = {}
_num_sessions: Counter[tuple[str, str, int]] = Counter()
"""Sessions of this process, by the address of the store and `lost_ranks.generation`."""


def _open_store(timeout: timedelta, seconds: float) -> tuple[Any, int, int]:
    """Return a fresh store for one session, with this rank and the number of ranks. Without a
    launcher this process is the only rank.

    All sessions of a launch share one server. If each session opened a server of its own at the
    launcher's port, a rank that is ahead would connect to the previous server, which a slower rank
    has yet to close. The server does not wait for the ranks: the watch detects ranks that do not
    come. Raises RuntimeError when there is no server after `seconds`.
    """
    if "WORLD_SIZE" not in os.environ:
        return dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise SettingError(
                f"the environment has WORLD_SIZE={os.environ['WORLD_SIZE']}, and no {name}: ranks "
                "cannot meet. Start them by --nproc or torchrun, or set all of RANK, WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT; for one process unset WORLD_SIZE"
            )
    address = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if address not in _stores:
        _stores.clear()  # of an earlier launch, as tests do many in one process
        _num_sessions.clear()
        rank = launched_rank()
        await_server(*address, rank, seconds)
        # "1" is the number of ranks that the server waits for
        store, _, _ = next(rendezvous("env://", rank, 1, timeout=max(timeout, CONNECT_LIMIT)))
        _stores[address] = store
    store, met = _stores[address], (*address, generation())
    store.set_timeout(timeout)
    _num_sessions[met] += 1
    prefix = f"session {_num_sessions[met]}"
    if generation():  # ranks may have opened different numbers of sessions when one died
        prefix = f"after {generation()} changes/{prefix}"
    return dist.PrefixStore(prefix, store), launched_rank(), world_size()  # type: ignore[attr-defined]


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _add_up(values: Sequence[float]) -> Callable[[], list[float]]:
    """Begin to add up values over ranks; the returned function waits for the sums."""
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
        self.feeders: Any = None
        """The process group of one rank of each feeder, this one among them; None: all ranks."""
        self._shared_memory: shm_tally.SharedMemorySum | None = None
        self._is_opened = False
        self._layers: used_layers.UsedLayers | None = None

    @property
    def waited_seconds(self) -> float:
        """Seconds for which this rank has waited for others: in tallies and other calls that only
        communicate, and in the backward of replicas on the host."""
        watch = stall_watch.this_session()
        return 0.0 if watch is None else watch.waits.seconds

    def leave(self) -> None:
        """See `LeavesRanks`."""
        self.world = World(0, 1, self.world.device, feeder_index=0, num_feeders=1)
        self._layers = None

    def watch(self, report: Callable[[int, float, str], None], /) -> None:
        stall_watch.listen(lambda late: report(late.rank, late.seconds, str(late)))

    def abort(self, why: str, retry: bool = True) -> bool:
        return stall_watch.abort(why, retry)

    def seed(self, value: int) -> None:
        seed_generators(value, devices=True)

    def prepare(self, recipe: Recipe) -> Engine:
        with naming_collectives("preparing the model", self.world.rank, patient=True):
            engine = self._build(recipe, self.plan, self.world)
        if (layers := used_layers.follow(engine)) is not None:
            layers.shared_memory = self._shared_memory
        self._layers = layers
        return engine

    def feed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return prefetch.feed(batches, self._device)

    def tally(self, values: Sequence[float]) -> Callable[[], list[float]]:
        if self.world.size == 1:
            return lambda: list(values)
        stall_watch.count_step()
        layers, own = self._layers, len(values)
        if layers is not None:
            turn, *used = layers.end_turn()
            values = [*values, *used]
        shared_memory = self._opened_shared_memory() if len(values) <= shm_tally.MOST else None
        begin = _add_up if shared_memory is None else shared_memory.publish
        with self._named("starting to add up the step's counts"):
            sums = begin(values)

        def wait() -> list[float]:
            with self._named("adding up the step's counts"):
                added = sums()
            if layers is not None:
                layers.require_same(turn, *added[own:])
            return added[:own]

        return wait

    def _opened_shared_memory(self) -> shm_tally.SharedMemorySum | None:
        """Return the shared memory, opened by the first tally, which all ranks begin."""
        if not self._is_opened:
            world, timeout = self.world, self.plan.timeout_seconds
            timeout += 0.0 if self.plan.stall_seconds is None else 2 * stall_watch.GRACE_SECONDS
            args = world.rank, world.size, timeout, self.exchange, stall_watch.rank_aborted
            self._shared_memory = shm_tally.opened(*args)
            self._is_opened = True
            if self._layers is not None:
                self._layers.shared_memory = self._shared_memory
        return self._shared_memory

    def exchange(self, value: Any) -> list[Any]:
        if self.world.size == 1:
            return [json.loads(json.dumps(value))]
        turn = None if self._layers is None else self._layers.end_turn()
        encoded = bytearray(json.dumps([value, turn]).encode())
        tensor = torch.frombuffer(encoded, dtype=torch.uint8)
        parts = self._gather(tensor, "exchanging values", patient=True)
        received = [json.loads(bytes(part.tolist())) for part in parts]
        if self._layers is not None and turn is not None:
            shorts, squares = (sum(used[i] for _, used in received) for i in (1, 2))
            self._layers.require_same(turn.number, shorts, squares)
        return [one for one, _ in received]

    def reduce(self, tensor: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
        if self.world.size == 1:
            return tensor.detach().clone()
        result = keep_for_a_while(tensor.detach().clone())
        with self._named(f"reducing a tensor of shape {tuple(tensor.shape)}"):
            dist.all_reduce(result, _OPS[op], group=self.feeders)
        return result

    def gather(self, tensor: Tensor) -> Tensor:
        if self.world.size == 1:
            return tensor.detach().to("cpu", copy=True)
        return torch.cat(self._gather(tensor.detach().cpu(), "gathering a tensor", self.feeders))

    def _gather(
        self, tensor: Tensor, call: str, group: Any = None, patient: bool = False
    ) -> list[Tensor]:
        """Gather host tensors of uneven length: lengths first, then parts padded to the longest
        one.
        """
        with self._named(call, patient):
            size = dist.get_world_size(group)
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
            dist.all_gather(lengths, keep_for_a_while(torch.tensor([len(tensor)])), group=group)
            longest = max(int(length) for length in lengths)
            mine = tensor.new_zeros((longest, *tensor.shape[1:]))
            mine[: len(tensor)] = tensor
            parts = [torch.empty_like(mine) for _ in lengths]
            dist.all_gather(parts, keep_for_a_while(mine), group=group)
            for kept in (*lengths, *parts):
                keep_for_a_while(kept)
        return [part[: int(length)] for part, length in zip(parts, lengths, strict=True)]

    def rng_state(self) -> dict[str, Tensor]:
        return random_state.rng_state(self._device)

    def set_rng_state(self, state: Mapping[str, Tensor]) -> None:
        random_state.set_rng_state(self._device, state)

    def _named(self, call: str, patient: bool = False) -> AbstractContextManager[None]:
        return naming_call(call, self.world.rank, patient)

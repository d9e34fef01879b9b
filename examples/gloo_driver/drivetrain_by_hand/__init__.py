"""Data parallelism by hand: each rank holds the whole model, and gloo adds up the gradients."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import make_dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.backends.common import fork_gc, plain_engine, single_process
from drivetrain.kernel.contract import Outcome, World
from drivetrain.kernel.errors import CollectiveFailed
from drivetrain.kernel.plan import Capabilities, Plan, Probe
from drivetrain.kernel.recipe import Recipe


class Driver:
    name = "by_hand"
    options_type = make_dataclass("Options", (), frozen=True)  # none of its own

    def probe(self) -> Probe:
        return Probe(dist.is_available(), "gloo on the CPU", devices=("cpu",), preference=-1)

    def capabilities(self, plan: Plan) -> Capabilities:
        return Capabilities(
            precisions=frozenset({"fp32"}),
            multi_process=True,
            sharded=False,
            compile=False,
            activation_checkpointing=False,
            feeds_ahead=False,
        )

    @contextmanager
    def open(self, plan: Plan) -> Iterator[Session]:
        fork_gc.leave_the_parents_garbage()
        timeout = timedelta(seconds=plan.timeout_seconds)
        with named("joining the others"):
            met, rank, size = meet(os.environ.get("WORLD_SIZE"), os.environ.get("MASTER_PORT"))
            store = dist.PrefixStore(f"session {met.add(f'sessions of {rank}', 1)}", met)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=timeout
            )
        try:
            yield Session(plan, Engine, World(rank, size, torch.device("cpu"), rank, size))
            with suppress(RuntimeError):  # do not hang up on a rank that is still reading
                store.set(f"{rank} leaves", "")
                store.wait([f"{other} leaves" for other in range(size)], timedelta(seconds=30))
        finally:
            dist.destroy_process_group()


@lru_cache(maxsize=1)
def meet(world_size: str | None, port: str | None) -> tuple[Any, int, int]:
    """Meet once a launch: a rank that is ahead must not wait at the last session's store."""
    return next(dist.rendezvous("env://")) if world_size else (dist.HashStore(), 0, 1)


@contextmanager
def named(call: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise CollectiveFailed(f"rank {os.environ.get('RANK', '0')}: {call}: {error}") from error


class Session(single_process.HostSession):
    """A session on the host. All but the communication is that of one process."""

    def tally(self, values: Sequence[float]) -> Callable[[], list[float]]:
        sums = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(sums, async_op=True)
        return named("adding up counts")(lambda: work.wait() and sums.tolist())

    def exchange(self, value: Any) -> list[Any]:
        encoded = torch.tensor(list(json.dumps(value).encode() + b"\n"), dtype=torch.uint8)
        return [json.loads(line) for line in bytes(self.gather(encoded).tolist()).splitlines()]

    @named("reducing")
    def reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        result = tensor.detach().clone()
        dist.all_reduce(result, getattr(dist.ReduceOp, op.upper()))
        return result

    @named("gathering")
    def gather(self, tensor: Tensor) -> Tensor:
        rank, size = self.world.rank, self.world.size
        lengths = self.reduce((torch.arange(size) == rank) * len(tensor)).tolist()
        whole = tensor.new_zeros((sum(lengths), *tensor.shape[1:]))
        whole.split(lengths)[rank].copy_(tensor.detach())
        dist.all_reduce(whole.view(-1).view(torch.uint8))  # the others have zeros there
        return whole


class Replica(nn.Module):
    """A model whose forwards begin with rank 0's buffers."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        take_buffers(self.own)
        return self.own(*args, **kwargs)


@named("taking over the buffers of rank 0")
def take_buffers(module: nn.Module) -> None:
    for buffer in module.buffers():
        taken = buffer.detach().contiguous().clone().view(-1)
        dist.broadcast(taken.view(torch.uint8), src=0)  # as bytes, since gloo knows no bool
        buffer.data.copy_(taken.view_as(buffer))  # `data`: unseen by a backward to come


class Engine(plain_engine.PlainEngine):
    """Trains like one process, but averages gradients over ranks and takes rank 0's buffers."""

    def __init__(self, recipe: Recipe, plan: Plan, world: World) -> None:
        super().__init__(recipe, plan, world)
        self.module = Replica(self.own)

    def update(self) -> Outcome:
        """Average gradients. A rank without one adds zeros; without any, a parameter has none."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        found = torch.tensor([float(p.grad is not None) for p in self.parameters])
        sums = torch.cat([found, *(grad.reshape(-1) for grad in grads)])
        with named("averaging gradients"):
            dist.all_reduce(sums)
        found, *means = (sums / self.world.size).split([len(grads), *(g.numel() for g in grads)])
        for p, anywhere, mean in zip(self.parameters, found, means, strict=True):
            p.grad = mean.view_as(p).to(p.dtype) if anywhere else None
        return super().update()

    @contextmanager
    def full_params(self, names: Sequence[str] | None = None) -> Iterator[nn.Module]:
        take_buffers(self.own)
        yield self.own


driver = Driver()

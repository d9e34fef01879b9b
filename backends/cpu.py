"""The reference driver: one process, on the CPU, nothing hidden.

Read it to learn what a driver is; `docs/writing-a-driver.md` walks through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..kernel.contract import (
    Batch,
    Capabilities,
    Layout,
    Outcome,
    Piece,
    Plan,
    Probe,
    Reader,
    Recipe,
    World,
)
from . import _torch

__all__ = ["driver"]


@dataclass(frozen=True)
class CpuOptions:
    """The driver's own arguments."""

    threads: int | None = None
    """Threads of one operation; torch's own choice by default."""


class CpuDriver:
    """One process on the host."""

    name = "cpu"
    options_type = CpuOptions

    def probe(self) -> Probe:
        return Probe(
            usable=True,
            reason=f"{torch.get_num_threads()} threads",
            versions={"torch": torch.__version__},
            devices=("cpu",),
            memory_bytes=_torch.host_memory(),
        )

    def capabilities(self, plan: Plan) -> Capabilities:
        return Capabilities(
            precisions=frozenset({"fp32", "bf16", "fp16"}),
            multi_process=False,
            sharded=False,
            compile=True,
            activation_checkpointing=True,
            feeds_ahead=False,
        )

    def layout(
        self, plan: Plan, model: nn.Module, state_bytes: Mapping[str, int], world_size: int
    ) -> Layout:
        return _torch.replicated_layout(plan, model, state_bytes)

    @contextmanager
    def open(self, plan: Plan) -> Iterator[CpuSession]:
        options = plan.options or CpuOptions()
        before = torch.get_num_threads()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        try:
            yield CpuSession(plan)
        finally:
            torch.set_num_threads(before)


class CpuSession:
    """Nobody to talk to: every sum over ranks is the value itself."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world = World(0, 1, torch.device("cpu"), feeder_index=0, num_feeders=1)

    def seed(self, value: int) -> None:
        _torch.seed_all(value)

    def prepare(self, recipe: Recipe) -> CpuEngine:
        return CpuEngine(recipe, self.plan, self.world)

    def feed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return batches

    def tally(self, values: Sequence[float]) -> Callable[[], list[float]]:
        return lambda: list(values)

    def exchange(self, value: Any) -> list[Any]:
        return [value]

    def reduce(self, tensor: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
        return tensor.clone()

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def rng_state(self) -> dict[str, Tensor]:
        return _torch.rng_state(self.world.device)

    def set_rng_state(self, state: Mapping[str, Tensor]) -> None:
        _torch.set_rng_state(self.world.device, state)


class CpuEngine:
    """The user's own module, unwrapped."""

    def __init__(self, recipe: Recipe, plan: Plan, world: World) -> None:
        self.plan = plan
        self.module = _torch.build_model(recipe, plan, world.device)
        self.tied = _torch.tied_groups(self.module)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = _torch.build_optimizer(recipe, self.module)
        self.autocast = _torch.autocast(plan, world.device)
        self.loss_scale = _torch.LossScale(world.device) if plan.precision.loss_scaling else None
        if plan.compile:
            self.module.compile()  # in place: names and the module itself stay

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups  # `load_state_dict` makes a new list

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        return _torch.NO_CONTEXT

    def backward(self, loss: Tensor) -> None:
        if self.loss_scale is not None:
            loss = loss * self.loss_scale.scale
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> Outcome:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if self.loss_scale is not None:
            self.loss_scale.unscale(grads)
        norm = _torch.global_norm(grads)
        return _torch.step_if_finite(
            self.optimizer, grads, norm, self.plan.max_grad_norm, self.loss_scale
        )

    def shards(self) -> Iterator[Piece]:
        return _torch.replicated_pieces(self.module, self.optimizer, self.loss_scale, 0, 1)

    def restore(self, reader: Reader) -> None:
        _torch.restore_replicated(reader, self.module, self.optimizer, self.loss_scale)

    def full_params(self, names: Sequence[str] | None = None) -> AbstractContextManager[nn.Module]:
        return nullcontext(self.module)


driver = CpuDriver()

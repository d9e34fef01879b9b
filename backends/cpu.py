"""The reference driver: one process, on the CPU, nothing hidden.

Read it to learn what a driver is; `docs/writing-a-driver.md` walks through it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernel.contract import Outcome, World
from ..kernel.plan import Capabilities, Layout, Plan, Probe
from ..kernel.ranges import check_range, most_at_once
from ..kernel.recipe import Recipe
from ..kernel.shards import Piece, Reader
from .common import layouts, model_state, models, stepping
from .common.optimizer_state import OptimizerState
from .common.single_process import HostSession, threads_of_one_operation

__all__ = ["driver"]


@dataclass(frozen=True)
class CpuOptions:
    """The driver's own arguments."""

    threads: int | None = None
    """Threads of one operation; torch's own choice by default."""

    def __post_init__(self) -> None:
        check_range("backend.threads", self.threads, 1, most_at_once())


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
            memory_bytes=layouts.host_memory(),
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
        return layouts.replicated_layout(plan, model, state_bytes)

    @contextmanager
    def open(self, plan: Plan) -> Iterator[HostSession]:
        options = plan.options or CpuOptions()
        with threads_of_one_operation(options.threads):
            yield HostSession(plan, CpuEngine)


class CpuEngine:
    """The user's own module, unwrapped."""

    def __init__(self, recipe: Recipe, plan: Plan, world: World) -> None:
        self.plan = plan
        self.module = models.build_model(recipe, plan, world.device)
        self.tied = models.tied_groups(self.module)
        self.num_parameters = sum(p.numel() for p in self.module.parameters())
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = models.build_optimizer(recipe, self.module)
        self.state = OptimizerState(self.optimizer, self.module)
        self.autocast = models.autocast(plan, world.device)
        self.loss_scale = stepping.LossScale(world.device) if plan.precision.loss_scaling else None
        if plan.compile:
            # in place: names and the module itself stay
            self.module.compile(**plan.compile_options)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups  # `load_state_dict` makes a new list

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        return models.NO_CONTEXT

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        stepping.backward(loss, weight, self.loss_scale)

    def unused(self) -> Sequence[str]:
        return models.without_gradient(self.module)

    def update(self) -> Outcome:
        return stepping.update(
            self.optimizer, self.parameters, self.plan.max_grad_norm, self.loss_scale
        )

    def shards(self) -> Iterator[Piece]:
        return model_state.replicated_pieces(self.module, self.state, self.loss_scale, 0, 1)

    def restore(self, reader: Reader) -> None:
        model_state.restore_replicated(reader, self.module, self.state, self.loss_scale)

    def full_params(self, names: Sequence[str] | None = None) -> AbstractContextManager[nn.Module]:
        return nullcontext(self.module)


driver = CpuDriver()

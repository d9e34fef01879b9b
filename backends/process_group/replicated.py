"""DistributedDataParallel, for every driver whose ranks each hold the whole model.

https://arxiv.org/abs/2006.15704
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...kernel.contract import Outcome, World
from ...kernel.errors import CapabilityRefused, RecipeError
from ...kernel.plan import Plan
from ...kernel.ranges import check_range
from ...kernel.recipe import Recipe
from ...kernel.shards import Piece, Reader
from ..common import models
from ..common.plain_engine import PlainEngine
from .buffers import Buffers
from .collectives import naming_collectives
from .peers import Peers

SAVES_MEMORY = "every rank holds the whole model: the backends fsdp and deepspeed cut it over ranks"


@dataclass(frozen=True)
class ReplicatedOptions:
    """Arguments of `torch.nn.parallel.DistributedDataParallel`, with its defaults."""

    bucket_cap_mb: int = 25
    """Gradients are averaged in buckets of this size, while backward goes on."""
    find_unused_parameters: bool = False
    """Look after each forward for parameters that took no part."""
    sync_buffers: bool = True
    """Give every rank rank 0's buffers before each forward. False: each goes on with its own, which
    come back on as many ranks; rank 0's are the model's, wherever it is shown."""
    sync_batch_norm: bool = False
    """On GPUs: batch normalisation takes its statistics over the microbatches of all ranks
    (`torch.nn.SyncBatchNorm`), not over each rank's own."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order. Not with accumulation."""

    def __post_init__(self) -> None:
        check_range("backend.bucket_cap_mb", self.bucket_cap_mb, 0)

    @property
    def finds_unused(self) -> bool:
        """True if parameters may go without a gradient."""
        return self.find_unused_parameters or self.static_graph

    def arguments(self, takes_turns: bool) -> dict[str, Any]:
        """As this torch calls them; a static graph is promised later. `takes_turns`: an update
        trains but a part of the model."""
        # one was renamed in torch 2.15; delete the old name when 2.14 is no longer supported
        known = inspect.signature(DistributedDataParallel).parameters
        new, old = "forward_sync_buffers", "broadcast_buffers"
        return {
            "bucket_cap_mb": self.bucket_cap_mb,
            "find_unused_parameters": (takes_turns or self.finds_unused) and not self.static_graph,
            new if new in known else old: False,  # see buffers.py
        }


class DdpEngine(PlainEngine):
    """The module in DistributedDataParallel; what is saved is as in one process."""

    module: _InOneOrder

    def __init__(self, recipe: Recipe, plan: Plan, world: World) -> None:
        self.options: ReplicatedOptions = plan.options or ReplicatedOptions()
        super().__init__(recipe, plan, world)
        if plan.micro_batch and plan.micro_batch * world.size < plan.global_batch:
            self._refuse_accumulation()
        self.takes_turns = hasattr(recipe.loss, "of_update")
        if self.takes_turns:
            self._refuse_static_graph("updates that take turns", "each trains other parameters")
        autocast = self.autocast
        self.autocast = lambda: naming_collectives("a forward", world.rank, inside=autocast())
        arguments = self.options.arguments(self.takes_turns)
        self.module = _InOneOrder(self.own, self.options.static_graph, **arguments)
        self.buffers = Buffers(self.own, Peers(world.rank, world.size), self.options.sync_buffers)
        self.buffers.take_before_forward(self.module)

    def build_model(self, recipe: Recipe) -> nn.Module:
        return models.with_synced_batch_norm(
            super().build_model(recipe),
            self.options.sync_batch_norm,
            self.world.device,
            "ddp",  # xpu is no CPU
        )

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        if not last:
            self._refuse_accumulation()
        return models.NO_CONTEXT if last else self.module.no_sync()

    def _refuse_accumulation(self) -> None:
        """DDP counts the gradients of its first backward, and takes one without others for all."""
        self._refuse_static_graph(
            "updates of several microbatches",
            "DistributedDataParallel learns the graph from a first backward that sends "
            "gradients, and that of an accumulated microbatch sends none",
            ", or make micro_batch as large as each rank's part of global_batch",
        )

    def _refuse_static_graph(self, what: str, why: str, or_else: str = "") -> None:
        if self.options.static_graph:
            asked = f"backend.static_graph=true in {what}"
            raise CapabilityRefused(asked, "ddp", f"{why}. Leave it out{or_else}")

    def backward(self, loss: Tensor, weight: Tensor) -> None:
        with naming_collectives("averaging gradients in a backward", self.world.rank):
            super().backward(loss, weight)

    def unused(self) -> Sequence[str]:
        names = super().unused()
        if not (self.takes_turns or self.options.finds_unused):
            self._refuse_unused(names)
        return names

    def update(self) -> Outcome:
        self._refuse_unused(self.module.waited_for())
        return super().update()

    def _refuse_unused(self, names: Sequence[str]) -> None:
        """DDP waits for their gradients, and averages none of those in a bucket with them."""
        if names:
            raise RecipeError(
                f"rank {self.world.rank}: no gradient reached {', '.join(names)} in the last "
                "microbatch of a step: set backend.find_unused_parameters=true, or freeze them "
                "(requires_grad=False), or leave them out of the model"
            )

    def shards(self) -> Iterator[Piece]:
        yield from self.buffers.own_pieces()
        yield from super().shards()

    def restore(self, reader: Reader) -> None:
        super().restore(reader)
        self.buffers.restore_own(reader)

    @contextmanager
    def full_params(self, names: Sequence[str] | None = None) -> Iterator[nn.Module]:
        with self.buffers.of_rank_0():
            yield self.own


class _InOneOrder(DistributedDataParallel):
    """DDP whose gradient buckets are the same in every step.

    DDP would rearrange them after the first backward, in the order in which the gradients came, so
    that the first step of a resumed run would add three ranks' numbers in another order.
    """

    def __init__(self, module: nn.Module, static_graph: bool, **arguments: Any) -> None:
        self._arranges = not arguments["find_unused_parameters"]
        super().__init__(module, gradient_as_bucket_view=True, **arguments)
        if self._arranges:
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()
        if static_graph:
            self._set_static_graph()  # type: ignore[no-untyped-call]

    def waited_for(self) -> list[str]:
        """The parameters whose gradients the last backward lacked, on this rank."""
        try:
            self.reducer._rebuild_buckets()  # which looks for that first, and has nothing to do
        except RuntimeError as error:
            if (found := re.search(r"receive grad for rank \d+: ([\d ]+)", str(error))) is None:
                raise
            parameters = self._build_params_for_reducer()[0]
            names = {parameter: name for name, parameter in self.module.named_parameters()}
            return sorted(names[parameters[int(index)]] for index in found[1].split())
        return []

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """The last ones first, as gradients come: buckets are sent in this order."""
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return (parameters[::-1], sparse[::-1]) if self._arranges else (parameters, sparse)

"""DistributedDataParallel, for every driver whose ranks each hold the whole model.

https://arxiv.org/abs/2006.15704
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...data.ranges import Range, check_ranges
from ...kernel.contract import Outcome, World
from ...kernel.errors import CapabilityRefused, RecipeError
from ...kernel.plan import Capabilities, Plan
from ...kernel.recipe import Recipe
from ...kernel.shards import Piece, Reader
from ..common import model_state, models
from ..common.entered import Entered
from ..common.extra_state import ExtraState
from ..common.frozen import Frozen
from ..common.plain_engine import PlainEngine
from ..common.writes import refuse_renormalising
from . import devices
from .buffers import Buffers
from .collectives import naming_collectives
from .copies import Copies, Held
from .peers import Peers
from .replicated_parameters import ReplicatedParameters


@dataclass(frozen=True)
class ReplicatedOptions:
    """Arguments of `torch.nn.parallel.DistributedDataParallel`, with its defaults."""

    bucket_cap_mb: Annotated[int, Range(0, unit="MiB")] = 25
    """Gradients are averaged in buckets of this size, while backward is running."""
    find_unused_parameters: bool = False
    """Search after each forward for parameters that took no part."""
    sync_buffers: bool = True
    """Give every rank the buffers of rank 0 before each forward. False: each rank keeps its own
    buffers, and resumes with them if there are as many ranks. Either way, the buffers of rank 0 are
    the model's, wherever it is shown.
    """
    sync_batch_norm: bool = False
    """On GPUs: batch normalisation takes its statistics over the microbatches of all ranks
    (`torch.nn.SyncBatchNorm`), not over those of each rank.
    """
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order. Not with accumulation."""

    def __post_init__(self) -> None:
        check_ranges(self, "backend.")

    @property
    def finds_unused(self) -> bool:
        """True if parameters may go without a gradient."""
        return self.find_unused_parameters or self.static_graph

    def arguments(self, takes_turns: bool) -> dict[str, Any]:
        """Return the options under the names of the installed torch; a static graph is promised
        later. `takes_turns`: an update trains only a part of the model.
        """
        # one was renamed in torch 2.15; delete the old name when 2.14 is no longer supported
        known = inspect.signature(DistributedDataParallel).parameters
        new, old = "forward_sync_buffers", "broadcast_buffers"
        return {
            "bucket_cap_mb": self.bucket_cap_mb,
            "find_unused_parameters": (takes_turns or self.finds_unused) and not self.static_graph,
            new if new in known else old: False,  # see buffers.py
        }


def promised(device_type: str, **fields: Any) -> Capabilities:
    """Return what a driver of replicas promises on a type of device; `fields`: see
    `devices.promised`."""
    advice = "every rank holds the whole model: the backends fsdp and deepspeed shard it"
    return devices.promised(device_type, sharded=False, saves_memory=advice, **fields)


class DdpEngine(PlainEngine):
    """The engine of a module in DistributedDataParallel; checkpoints are those of one process."""

    module: _FixedOrderDDP

    def __init__(self, recipe: Recipe, plan: Plan, world: World) -> None:
        self.options: ReplicatedOptions = plan.options or ReplicatedOptions()
        super().__init__(recipe, plan, world)
        refuse_renormalising(self.own, world.size)
        if plan.micro_batch and plan.micro_batch * world.size < plan.global_batch:
            self._refuse_accumulation()
        self.takes_turns = hasattr(recipe.loss, "of_update")
        if self.takes_turns:
            self._refuse_static_graph("updates that take turns", "each trains other parameters")
        autocast = self.autocast
        self.autocast = lambda: naming_collectives("a forward", world.rank, inside=autocast())
        arguments = self.options.arguments(self.takes_turns)
        self.module = _FixedOrderDDP(self.own, self.options.static_graph, **arguments)
        peers = Peers(world.rank, world.size)
        self.buffers = Buffers(self.own, peers, world.device, self.options.sync_buffers)
        self.extra = self.buffers.extra
        self.buffers.take_before_forward(self.module)
        self._copies = Copies(self._held, world)
        self._kept: dict[str, Tensor] = {}
        self._frozen, self._entered = Frozen(self.own), Entered(self.module)

    def build_model(self, recipe: Recipe) -> nn.Module:
        return models.with_synced_batch_norm(
            super().build_model(recipe),
            self.options.sync_batch_norm,
            self.world.device,
            "ddp",  # xpu is no CPU
        )

    def microbatch(self, last: bool) -> AbstractContextManager[Any]:
        self._entered.begin(sends=last and self.world.size > 1)
        watched = super().microbatch(last)
        if last:
            return watched
        self._refuse_accumulation()
        return self._not_sent(watched)

    @contextmanager
    def _not_sent(self, watched: AbstractContextManager[Any]) -> Iterator[None]:
        with watched, self.module.no_sync():
            yield

    def without_update(self) -> AbstractContextManager[Any]:
        return self.module.no_sync()

    def follow(self, registered: Mapping[str, nn.Parameter]) -> None:
        known = {id(parameter) for parameter in self.parameters}
        if added := [n for n, p in registered.items() if p.requires_grad and id(p) not in known]:
            super().follow(registered)  # some of these may replace earlier ones
            raise RecipeError(
                f"{', '.join(added[:10])}: these parameters were added to the model during the "
                "run, and DistributedDataParallel averages the gradients of those parameters alone "
                "that existed when it was built. Add them in recipe.model (compat: before the "
                "Trainer is made), frozen until they are to learn; or train in one process "
                "(backend cpu)"
            )
        super().follow(registered)

    def _refuse_accumulation(self) -> None:
        """Refuse accumulation with a static graph: DDP counts the gradients of its first backward,
        and takes one without any for all.
        """
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
        # autograd runs the operations of the host in this thread, and those of a device elsewhere
        on_host = self.world.device.type == "cpu"
        call, rank = "averaging gradients in a backward", self.world.rank
        named = naming_collectives(call, rank, counts_idle=on_host)
        with self._entered.backward(loss), named:
            super().backward(loss, weight)

    def unused(self) -> Sequence[str]:
        names = super().unused()
        if not (self.takes_turns or self.options.finds_unused):
            self._refuse_unused(names)
        return names

    def update(self) -> Outcome:
        self._refuse_unused(self.module.missing_gradients())
        if thawed := self._frozen.thawed():  # DDP does not know them
            peers = Peers(self.world.rank, self.world.size)
            unknown = ReplicatedParameters(thawed.values(), peers, self.world.device)
            unknown.average(self.plan.precision.reduce)
        return super().update()

    def audit(self) -> None:
        self._copies.compare()

    def _held(self) -> Iterator[Held]:
        return (Held(name, "", weight) for name, weight in self.own.named_parameters())

    def _refuse_unused(self, names: Sequence[str]) -> None:
        """Raise `RecipeError` for parameters without a gradient: DDP waits for them, and averages
        no gradient in their buckets.
        """
        if names:
            remedy = "set backend.find_unused_parameters=true"
            if self.options.finds_unused:  # and DDP looks from the output, not from the loss
                remedy = "the model's output depends on them: add zero times the output to the loss"
            raise RecipeError(
                f"rank {self.world.rank}: no gradient reached {', '.join(names)} in the last "
                f"microbatch of a step: {remedy}, or freeze them (requires_grad=False), or leave "
                "them out of the model"
            )

    def shards(self) -> Iterator[Piece]:
        yield from self.buffers.own_pieces()
        yield from super().shards()

    def part(self) -> tuple[int, int]:
        """See `HoldsParts`: each rank holds all."""
        return 0, 1

    def begin_step(self) -> None:
        """See `HoldsParts`."""
        self._kept = model_state.copied_buffers(self.own)

    def held(self) -> Iterator[Piece]:
        """See `HoldsParts`. The module's other state is as it is."""
        yield from ExtraState(self.own, self.world.device).pieces()
        for piece in model_state.replicated_pieces(self.own, self.state, self.loss_scale, 0, 1):
            kept = self._kept.get(piece.name) if piece.kind == "weights" else None
            yield piece if kept is None else replace(piece, tensor=kept)

    def restore(self, reader: Reader) -> None:
        super().restore(reader)
        self.buffers.restore_own(reader)

    @contextmanager
    def full_params(self, names: Sequence[str] | None = None) -> Iterator[nn.Module]:
        with self.buffers.of_rank_0():
            yield self.own


class _FixedOrderDDP(DistributedDataParallel):
    """DDP whose gradient buckets are the same in every step.

    DDP would rearrange its buckets after the first backward, in the order in which gradients came.
    Then the first step of a resumed run would add the numbers of three ranks in another order.
    """

    def __init__(self, module: nn.Module, static_graph: bool, **arguments: Any) -> None:
        self._arranges = not arguments["find_unused_parameters"]
        super().__init__(module, gradient_as_bucket_view=True, **arguments)
        if self._arranges:
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()
        if static_graph:
            self._set_static_graph()  # type: ignore[no-untyped-call]

    def missing_gradients(self) -> list[str]:
        """Return the parameters whose gradients the last backward lacked, on this rank."""
        try:
            self.reducer._rebuild_buckets()  # checks that first, and has nothing else to do
        except RuntimeError as error:
            if (found := re.search(r"receive grad for rank \d+: ([\d ]+)", str(error))) is None:
                raise
            parameters = self._build_params_for_reducer()[0]
            names = {parameter: name for name, parameter in self.module.named_parameters()}
            return sorted(names[parameters[int(index)]] for index in found[1].split())
        return []

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Return the last parameters first, as gradients come: buckets are sent in this order."""
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return (parameters[::-1], sparse[::-1]) if self._arranges else (parameters, sparse)

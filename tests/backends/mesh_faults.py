"""Faults of meshes. Each leaves out one thing that a mesh needs, as happened in practice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain.backends.fsdp import dtensor
from drivetrain.backends.fsdp.driver import FsdpDriver
from drivetrain.backends.fsdp.engine import FsdpEngine
from drivetrain.backends.mesh import context, experts, layers, p2p, pipeline, tensor
from drivetrain.backends.mesh.driver import MeshDriver, MeshSession
from drivetrain.backends.mesh.one_layer import Layer
from drivetrain.backends.mesh.schedule_runner import ScheduleRunner
from drivetrain.kernel.contract import Outcome, World
from drivetrain.kernel.shards import Box

__all__ = ["FAULTS", "plant", "planted"]

Change = tuple[Any, str, Any]
"""An object, the attribute to replace, and its replacement."""


def untied() -> Iterable[Change]:
    yield layers, "_tie_again", lambda module, tied: None


def partitioned_as_one() -> Iterable[Change]:
    yield layers.Fused, "_swapped", lambda self, whole, first, second: whole


def several_unknown() -> Iterable[Change]:
    partition = tensor.partition_layers

    def partition_layers(module: nn.Module, parallel: Any, *given: Any, **more: Any) -> Any:
        return partition(module, replace(parallel, fused={}), *given, **more)

    yield tensor, "partition_layers", partition_layers


def bias_of_each() -> Iterable[Change]:
    """Add the bias on every rank to a layer partitioned by its inputs, whose outputs are summed."""
    partition = Layer.parallelise

    def parallelise(self: Layer, mesh: Any, between: Any) -> None:
        partition(self, mesh, between)

        def add(part: Any, args: Any, output: Tensor) -> Tensor:
            bias = part.bias.full_tensor() if isinstance(part.bias, DTensor) else part.bias
            return output + (mesh.size() - 1) * bias

        if self.how == "row":
            self.part.register_forward_hook(add)

    yield Layer, "parallelise", parallelise


def one_divisor() -> Iterable[Change]:
    yield dtensor, "num_replicas", lambda tensor, size: size // tensor.device_mesh.size()


def counted_by_each() -> Iterable[Change]:
    yield World, "replicated_sum_weight", 1.0


def counted_in_parts() -> Iterable[Change]:
    """Divide the sum of items, although ranks that share sequences have only a part of the items
    each.
    """
    once = property(lambda self: self.num_readers / self.size / self.feeders_per_reader)
    yield World, "replicated_sum_weight", once


def reduced_over_all() -> Iterable[Change]:
    yield MeshSession, "feeders", property(lambda self: None, lambda self, group: None)


def own_samples() -> Iterable[Change]:
    yield World, "reader_index", property(lambda self: self.rank)
    yield World, "num_readers", property(lambda self: self.size)


def exchanged_twice() -> Iterable[Change]:
    attend = context.UlyssesAttention._attend

    def again(self: Any, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        there, back = cast(Any, context._Exchange.apply), cast(Any, context._Exchange.apply)
        moved = [there(each, -3, -2, self.group) for each in (query, key, value)]
        found: Tensor = back(attend(self, *moved, **more), -2, -3, self.group)
        return found

    yield context.UlyssesAttention, "_attend", again


def positions_from_0() -> Iterable[Change]:
    taken = context.ContextPartition._part

    def part(self: Any, batch: Any, length: int) -> Any:
        found = taken(self, batch, length)
        name = self.parallel.positions
        return {**found, name: found[name] - found[name][:, :1]} if name else found

    yield context.ContextPartition, "_part", part


def in_another_order() -> Iterable[Change]:
    def walked(tensor: Any) -> Box:
        mesh = tensor.device_mesh
        shardings = [
            (each.dim, mesh.get_local_rank(axis), mesh.size(axis))
            for axis, each in enumerate(tensor.placements)
            if hasattr(each, "dim")
        ]
        return dtensor.chunk_of(tuple(tensor.shape), shardings)

    yield dtensor, "own_box", walked


def norm_of_a_part() -> Iterable[Change]:
    """Average the squared norm over ranks, though each of them has only a part of it."""
    update = FsdpEngine.update

    def updated(self: Any) -> Outcome:
        outcome = update(self)
        return replace(outcome, grad_norm=outcome.grad_norm / self.world.size**0.5)

    yield FsdpEngine, "update", updated


# --- pipelines ------------------------------------------------------------------------------------


def not_divided_by_items() -> Iterable[Change]:
    backward = FsdpEngine.backward

    def undivided(self: Any, loss: Tensor, weight: Tensor) -> None:
        backward(self, loss, torch.ones_like(weight))

    yield FsdpEngine, "backward", undivided


def divided_by_microbatches() -> Iterable[Change]:
    run = ScheduleRunner._run_schedule

    def divided(self: Any, queue: Sequence[Any], weight: float) -> Tensor:
        return run(self, queue, weight / len(queue))

    yield ScheduleRunner, "_run_schedule", divided


def tied_apart() -> Iterable[Change]:
    yield pipeline.PipelinePartition, "_add_up_tied", lambda self: None


def tied_counted_by_each() -> Iterable[Change]:
    yield pipeline.PipelinePartition, "_holders_of", lambda self, name: [0]


def stale_rows() -> Iterable[Change]:
    receive = p2p.PipelineP2P.receive
    kept: dict[int, Tensor] = {}

    def shorter(self: Any, rank: int) -> Tensor:
        found = receive(self, rank)
        held = kept.setdefault(found.dim(), found.clone())
        held[: len(found)] = found[: len(held)]
        return held.clone()

    yield p2p.PipelineP2P, "receive", shorter
    yield MeshDriver, "capabilities", FsdpDriver.capabilities


def rows_of_another() -> Iterable[Change]:
    """Keep rows of an earlier tensor when a shorter one is received, and return as many rows as
    expected.
    """
    receive = p2p.PipelineP2P.receive
    kept: dict[int, Tensor] = {}

    def shorter(self: Any, rank: int) -> Tensor:
        found = receive(self, rank)
        held = kept.setdefault(found.dim(), found)
        return held[: len(found)].clone() if len(found) < len(held) else found

    yield p2p.PipelineP2P, "receive", shorter


# --- experts ------------------------------------------------------------------------------------


def averaged_as_others() -> Iterable[Change]:
    yield experts.ExpertPartition, "complete_gradients", lambda self: None


def counted_as_others() -> Iterable[Change]:
    """Count experts in the norm as if each rank had all of them."""
    replicas = FsdpEngine.num_replicas

    def counted(self: Any, name: str, parameter: nn.Parameter) -> int:
        names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
        of_experts = self.plan.options.expert if "expert" in (names or ()) else 1
        return replicas(self, name, parameter) * of_experts

    yield FsdpEngine, "num_replicas", counted


def no_way_back() -> Iterable[Change]:
    """Send tokens to their experts, but no gradients back."""

    def backward(ctx: Any, *gradients: Tensor) -> Any:
        sent, taken, group = ctx.sizes
        found = (experts._exchange(each, sent, taken, group) for each in gradients)
        return (None, None, None, *(torch.zeros_like(each) for each in found))

    yield experts._Exchange, "backward", staticmethod(backward)


def router_detached() -> Iterable[Change]:
    checked = experts.Experts._check_inputs

    def constant(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        tokens, indices, weights = checked(self, *args, **kwargs)
        return tokens, indices, weights.detach()

    yield experts.Experts, "_check_inputs", constant


def answers_in_another_order() -> Iterable[Change]:
    exchange = experts._exchange
    yield experts, "_exchange", lambda *given: exchange(*given).flip(0)


def nothing_in_place_of_nothing() -> Iterable[Change]:
    def computed(self: Any, *given: Tensor) -> Tensor:
        with self._local_weights():
            found: Tensor = self._forward(*given)
        return found

    yield experts.Experts, "_compute", computed


def each_of_all_tokens() -> Iterable[Change]:
    join = experts._gather_rows

    def joined(part: Tensor, rows: Sequence[int], group: Any) -> Tensor:
        return join(part, rows, group) * len(rows)

    yield experts, "_gather_rows", joined


def parts_apart() -> Iterable[Change]:
    yield tensor.TensorPartition, "_add_up_parts", lambda self: None
    yield tensor.TensorPartition, "_compare_replicas", lambda self: None


FAULTS: Mapping[str, Callable[[], Iterable[Change]]] = {
    "weights untied": untied,
    "fused layers partitioned as one": partitioned_as_one,
    "several in one taken for one": several_unknown,
    "a bias of each rank": bias_of_each,
    "one divisor for all norms": one_divisor,
    "items counted by each rank": counted_by_each,
    "items divided by parts": counted_in_parts,
    "losses reduced over all ranks": reduced_over_all,
    "each rank reads its own samples": own_samples,
    "exchanged twice": exchanged_twice,
    "positions from 0": positions_from_0,
    "sharded in another order": in_another_order,
    "norm of a part": norm_of_a_part,
    "not divided by items": not_divided_by_items,
    "divided by microbatches": divided_by_microbatches,
    "tied weights apart": tied_apart,
    "tied weights counted by each": tied_counted_by_each,
    "stale rows": stale_rows,
    "rows of another microbatch": rows_of_another,
    "averaged as others": averaged_as_others,
    "counted as others": counted_as_others,
    "no way back": no_way_back,
    "router detached": router_detached,
    "answers in another order": answers_in_another_order,
    "nothing in place of nothing": nothing_in_place_of_nothing,
    "gradients joined as if each rank had all": each_of_all_tokens,
    "gradients of parts of positions apart": parts_apart,
}


def plant(name: str) -> None:
    """Plant a fault for good: this process does nothing else afterwards."""
    for owner, key, made in FAULTS[name]():
        setattr(owner, key, made)


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a fault for the block; an empty name means no fault."""
    with ExitStack() as stack:
        for owner, key, made in FAULTS[name]() if name else ():
            stack.enter_context(mock.patch.object(owner, key, made, create=True))
        yield

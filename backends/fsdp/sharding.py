"""The arguments of torch's FSDP2: the driver's options, the mesh of ranks, the policies."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import nn

from ... import lost_ranks
from ...data.ranges import Range, check_ranges
from ...kernel.contract import World
from ...kernel.errors import SettingError
from ...kernel.plan import Plan
from ..common.float8 import Float8Options
from ..process_group.devices import choose_device
from ..process_group.session import process_group
from . import dtensor, wrap_units

_LOG = logging.getLogger(__name__)

LIBRARIES = ("torch.distributed.fsdp", "torch.distributed.tensor")
"""Python modules whose hooks are no user's."""


@dataclass(frozen=True)
class ShardingOptions(Float8Options):
    """How units are made and gathered, and the trade-offs for memory."""

    device: str = "auto"
    """`cpu`, or the type of an accelerator, such as `cuda`; `auto` takes an accelerator where there
    is one for every local rank."""
    wrap: tuple[str, ...] = ()
    """Units by class name or pattern of names (`fnmatch`). By default the repeated blocks of the
    model: children of one class in a list; the root takes what is left."""
    min_unit_params: Annotated[int, Range(0, unit="parameters")] | None = None
    """Without `wrap`: units by size, each submodule with at least so many parameters that are not
    in a smaller unit. A model without repeated blocks is divided so at 1,000,000."""
    reshard_after_forward: bool = True
    """Free a unit's weights after its forward, and gather them again for its backward."""
    reshard_after_backward: bool = True
    """Free gathered weights between microbatches, too; False keeps them until the update."""
    sync_each_microbatch: bool = False
    """Reduce gradients after each microbatch: more traffic, but no rank holds whole gradients."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory, and update them on the host."""
    gather_dtype: Literal["auto", "params", "compute"] = "auto"
    """The dtype in which units are gathered in mixed precision. `compute` halves traffic and
    memory; `params` is for models with layers that refuse weights of another dtype than their
    input (batch normalisation). `auto`: `compute` on accelerators, `params` on the CPU, where all
    normalisation layers do."""
    optimizer_step: Literal["auto", "parts", "tensors", "whole"] = "auto"
    """`parts`: each rank updates its part of a tensor; right for optimizers that treat elements
    alike. `tensors`: they are gathered one by one, for torch's Muon each on one rank, for others on
    all; right for those that treat tensors alike and keep nothing that all share. `whole`: all at
    once, in the memory of the whole model, its gradients and state; right for all. `auto`: the
    first that is right for torch's own optimizers, `whole`, with a warning, for others."""
    meta: bool = False
    """No rank ever holds the whole model. False: every rank builds it in host memory, with the
    recipe's own initial weights, and moves it to the device unit by unit. True: every parameter is
    dropped (to the meta device) as soon as it is made, and only this rank's part of it comes back:
    from the checkpoint on resume; on a fresh start from `reset_parameters()` of each module, or
    `_init_weights(module)` of the model, called on one whole module at a time, which give the same
    weights at any world size, but need not be those of the recipe's constructor."""
    from_rank_0: bool = False
    """Before the model is sharded, every rank takes the weights and buffers of rank 0, over the
    host: for models that only rank 0 read from disk, the others having empty memory or none
    (meta)."""
    sync_buffers: bool = True
    """Give every rank the buffers of rank 0 before each forward. False: each rank keeps its own
    buffers, and resumes with them if there are as many ranks. Either way, the buffers of rank 0 are
    the model's, wherever it is shown.
    """
    sync_batch_norm: bool = False
    """On GPUs: batch normalisation takes its statistics over the microbatches of all ranks
    (`torch.nn.SyncBatchNorm`), not over those of each rank.
    """

    def __post_init__(self) -> None:
        check_ranges(self, "backend.")


@dataclass(frozen=True)
class FsdpOptions(ShardingOptions):
    """How the model is sharded, and the trade-offs for memory."""

    shard_size: Annotated[int, Range(1, unit="ranks")] | None = None
    """Hybrid sharding: shard over groups of so many ranks, and replicate over the groups; it
    divides the number of ranks. By default all ranks are one group."""


def divisors(number: int) -> list[int]:
    """Return all divisors, the smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]


def gathered_dtype(plan: Plan) -> torch.dtype:
    """The dtype that weights travel in."""
    options = options_of(plan)
    in_compute = options.gather_dtype == "compute" or (
        options.gather_dtype == "auto" and choose_device(options.device).type != "cpu"
    )
    return plan.precision.compute if in_compute else plan.precision.params


def options_of(plan: Plan) -> ShardingOptions:
    """Return the sharding options of the plan, or the defaults."""
    return plan.options or FsdpOptions()


@contextmanager
def opened(plan: Plan) -> Iterator[World]:
    """The process group, on this rank's device."""
    options = options_of(plan)
    if options.from_rank_0 and options.meta:
        raise SettingError(
            "backend.from_rank_0 and backend.meta are both true: with meta no rank has weights "
            "that the others could take; set one of them"
        )
    try:
        with process_group(plan, choose_device(options.device)) as world:
            yield world
    finally:
        dtensor.forget_meshes()


def replicated_parameters(module: nn.Module, units: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters that cannot be sharded and stay whole on every rank, by FQN: those
    without dimensions or elements, complex ones, and those of another dtype than most of their
    unit, since a unit is gathered in one."""
    dtypes = {unit: Counter[torch.dtype]() for unit in (*units, module)}
    held = list(wrap_units.held(module, set(units), module, ""))
    for _, parameter, unit in held:
        if parameter.dim() and parameter.is_floating_point():
            dtypes[unit][parameter.dtype] += parameter.numel()
    usual = {unit: found.most_common(1)[0][0] for unit, found in dtypes.items() if found}
    other = {
        name: parameter
        for name, parameter, unit in held
        if parameter.is_complex()
        or (parameter.is_floating_point() and parameter.dtype != usual.get(unit, parameter.dtype))
    }
    if other:
        _LOG.warning(
            "every rank holds all of %s, %s elements: they are complex, or of another dtype than "
            "most of the unit that they are in. Let each unit (backend.wrap) have one, of real "
            "numbers",
            ", ".join(other) if len(other) < 10 else f"{len(other)} parameters",
            sum(parameter.numel() for parameter in other.values()),
        )
    found = {parameter: name for name, parameter in module.named_parameters()}
    small = {name: p for p, name in found.items() if not p.dim() or not p.numel()}
    return {**{found[p]: p for p in other.values()}, **small}


def moved(module: nn.Module, names: Iterable[str], device: torch.device) -> list[nn.Parameter]:
    """These parameters of the module, moved to the device: nothing else moves what is not
    sharded."""
    parameters = [module.get_parameter(name) for name in names]
    for parameter in parameters:
        parameter.data = parameter.data.to(device)
    return parameters


def shard(
    unit: nn.Module,
    plan: Plan,
    mesh: Any,
    ignored: set[nn.Parameter],
    placement: Callable[[nn.Parameter], Any] | None = None,
) -> Any:
    """Shard what no smaller unit has sharded, but for what is ignored; along dimension 0, unless
    `placement` says otherwise."""
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    options = options_of(plan)
    # The policy says what travels; autocast says what each operation computes in, as on all other
    # drivers. Alone, the policy would compute everything in the lower precision, also losses and
    # normalisation, and would round inputs that are no activations, such as targets.
    gathered = gathered_dtype(plan)
    policy = MixedPrecisionPolicy(
        param_dtype=None if gathered is plan.precision.params else gathered,
        # where it is the same, torch 2.8 fails on a layer that no microbatch so far has used
        reduce_dtype=None if gathered is plan.precision.reduce else plan.precision.reduce,
        cast_forward_inputs=False,
    )
    pinned = mesh.device_type != "cpu"
    fully_shard(
        unit,
        mesh=mesh,
        # None: all but the root, whose weights the backward needs at once
        reshard_after_forward=None if options.reshard_after_forward else False,
        mp_policy=policy,
        offload_policy=CPUOffloadPolicy(pinned) if options.cpu_offload else OffloadPolicy(),
        shard_placement_fn=placement,
        ignored_params=ignored,
    )
    assert isinstance(unit, FSDPModule)
    # gloo in torch 2.8 silently takes AVG for SUM; delete when 2.8 is no longer supported
    unit.set_force_sum_reduction_for_comms(True)
    if hasattr(unit, "generate"):
        # a wrapper's calls the model inside, such as PEFT's, and not the forward that gathers
        register_fsdp_forward_method(unit, "generate")
    return unit


def mixed_in() -> type:
    """Return the class that `shard` mixes into the class of a unit."""
    from torch.distributed.fsdp import FSDPModule

    return FSDPModule


def shard_size(options: ShardingOptions, num_ranks: int) -> int:
    """Return the number of ranks over which units are sharded. If ranks have died, and the others
    cannot form groups of `shard_size`, the groups are larger: no rank needs more memory then."""
    assert isinstance(options, FsdpOptions)
    size = options.shard_size or num_ranks
    if num_ranks % size and not lost_ranks.generation():
        raise SettingError(f"backend.shard_size is {size}; it must divide the {num_ranks} ranks")
    return next((n for n in range(size, num_ranks) if num_ranks % n == 0), num_ranks)


def mesh_of(options: ShardingOptions, world: World) -> Any:
    """Return a mesh of all ranks; with `shard_size`, of groups that replicate each other."""
    kind, size = world.device.type, shard_size(options, world.size)
    if size == world.size:
        return dtensor.make_mesh(kind, (size,))
    return dtensor.make_mesh(kind, (world.size // size, size), ("replicate", "shard"))

"""The state of a ZeRO optimizer, in the coordinates of the model's own parameters.

ZeRO keeps float32 masters and moments in flat tensors, one a group of parameters and a rank. Each
stretch of such a tensor is a flat range of one parameter, which is how it is saved; what DeepSpeed
itself saves is pickled and tied to the world size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.optimizer_entries import (
    copied,
    dtype_of,
    flat,
    is_state,
    nested,
    without_dtype,
)
from ...kernel.errors import CheckpointMismatch
from ...kernel.shards import Flat, Piece, Reader
from ..common import model_state, models
from ..common.optimizer_check import check
from ..common.optimizer_state import GroupNumbers
from .twins import fresh_state


@dataclass(frozen=True)
class Slice:
    """Elements `start <= i < stop` of a parameter, which lie at `offset` of a flat tensor."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int

    @property
    def region(self) -> Flat:
        return Flat(self.start, self.stop)

    def of(self, flat: Tensor) -> Tensor:
        """This stretch of the flat tensor, or of another one laid out alike."""
        return flat.detach()[self.offset : self.offset + self.stop - self.start]


@dataclass(frozen=True)
class Partition:
    """This rank's part of one group of parameters."""

    master: Tensor
    """Flat, float32; what the optimizer updates."""
    settings: Mapping[str, Any]
    """The optimizer's `param_groups` entry."""
    index: int
    """Index of the group among DeepSpeed's parameter groups."""
    slices: list[Slice] = field(default_factory=list)


def shape_of(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole parameter, even when it is partitioned (stage 3)."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def num_elements(module: nn.Module) -> int:
    """Count the elements of all parameters, unpartitioned."""
    return sum(math.prod(shape_of(parameter)) for parameter in module.parameters())


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters (each tied group once) and persistent buffers, by FQN."""
    return {name: shape_of(tensor) for name, tensor in _weights(module).items()}


def trained(zero: Any) -> set[int]:
    """The ids of the parameters that have masters."""
    groups = zero.bit16_groups if hasattr(zero, "bit16_groups") else zero.fp16_groups
    return {id(parameter) for group in groups for parameter in group}


def num_calls(zero: Any) -> int:
    """The number of times that a group of the optimizer takes part in one step: at stage 3 once for
    each part of the weights."""
    return len(zero.fp16_groups) if partitions_weights(zero) else 1


def counts_steps(zero: Any) -> bool:
    """Return True if the optimizer counts the steps of each group."""
    return any("step" in state for state in zero.optimizer.state.values())


def partitions_weights(zero: Any) -> bool:
    """Return True at stage 3, which partitions the weights."""
    return not hasattr(zero, "bit16_groups")


def partitions(zero: Any, module: nn.Module) -> list[Partition]:
    """Return the partitions of a stage 1, 2 or 3 optimizer, from where DeepSpeed put each
    parameter.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = []
    if hasattr(zero, "bit16_groups"):
        for i, group in enumerate(zero.bit16_groups):
            part = Partition(zero.single_partition_of_fp32_groups[i], zero.param_groups[i], i)
            for parameter in group:
                if (mapping := parameter._hp_mapping) is not None:
                    low, high = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
                    start, stop = low.start, low.start + low.numel
                    name, shape = names[parameter], shape_of(parameter)
                    part.slices.append(Slice(name, shape, start, stop, high.start))
            found.append(part)
        return found
    for i, group in enumerate(zero.fp16_groups):
        settings = zero.param_groups[zero.sub_group_to_group_id[i]]
        part, offset = Partition(zero.fp32_partitioned_groups_flat[i], settings, i), 0
        for parameter in group:
            start, stop = own_range(parameter)
            if start < stop:
                name, shape = names[parameter], shape_of(parameter)
                part.slices.append(Slice(name, shape, start, stop, offset))
            offset += parameter.partition_numel()
        found.append(part)
    return found


@contextmanager
def in_memory(zero: Any, index: int) -> Iterator[bool]:
    """Hold a group's master and state in memory within the block. Yields True if they are in files
    otherwise (NVMe offload): then copy what must outlive the block.
    """
    swapped = getattr(zero, "swap_optimizer", False) and zero._swappable_optimizer_subgroup(index)
    if swapped:
        zero._optimizer_states_and_gradient_swap_in(index)
    try:
        yield swapped
    finally:
        if swapped:
            zero._optimizer_states_and_gradient_swap_out(index)


def own_range(parameter: Any) -> tuple[int, int]:
    """Return this rank's range of a parameter that stage 3 partitions into padded parts of one
    size.
    """
    size = parameter.partition_numel()
    rank = torch.distributed.get_rank(parameter.ds_process_group)
    return min(rank * size, parameter.ds_numel), min((rank + 1) * size, parameter.ds_numel)


def _weights(module: nn.Module) -> dict[str, Tensor]:
    """`named_state` with the parameters themselves: they know how they are partitioned."""
    return {**model_state.named_state(module), **dict(module.named_parameters())}


def _apart(
    module: nn.Module, parts: list[Partition], trained: frozenset[str]
) -> tuple[dict[str, Tensor], list[tuple[Slice, Tensor]]]:
    """Weights without a master: tensors that every rank holds whole, own ranges of frozen ones."""
    whole, ranges = {}, []
    for name, tensor in _weights(module).items():
        if name in trained:
            continue
        if hasattr(tensor, "ds_tensor"):
            start, stop = own_range(tensor)
            if start < stop:
                ranges.append((Slice(name, shape_of(tensor), start, stop, 0), tensor.ds_tensor))
        else:
            whole[name] = tensor.detach()
    return whole, ranges


def pieces(
    module: nn.Module,
    zero: Any,
    trained: frozenset[str],
    counted: Mapping[str, Tensor],
    loss_scale: Mapping[str, Tensor],
    rank: int,
    size: int,
) -> Iterator[Piece]:
    """The pieces that this rank writes; weights are the masters. `counted`: numbers in the
    optimizer's groups."""
    parts = partitions(zero, module)
    for part in parts:
        with in_memory(zero, part.index) as for_a_while:
            for found in _of_masters(part, zero.optimizer):
                yield replace(found, tensor=found.tensor.clone()) if for_a_while else found
    whole, ranges = _apart(module, parts, trained)
    for piece, part_of_it in ranges:
        yield Piece("weights", piece.name, piece.of(part_of_it), piece.shape, piece.region)
    yield from model_state.buffer_pieces(module, rank)
    buffers = model_state.named_buffers(module)
    frozen = {name: tensor for name, tensor in whole.items() if name not in buffers}
    yield from model_state.partitioned_pieces(
        {"weights": frozen, "optimizer": counted, "state": loss_scale}, rank, size
    )


def _of_masters(part: Partition, optimizer: torch.optim.Optimizer) -> Iterator[Piece]:
    """The weights and the optimizer's state of one group."""
    entries = dict(optimizer.state.get(part.master, {}))
    if "step" in entries and _is_from("deepspeed", optimizer, part):  # its own count in ints
        entries["step"] = torch.as_tensor(entries["step"], dtype=torch.float32)
    like = part.master.dtype
    stored = [found for key, value in entries.items() for found in flat(key, value, like)]
    for piece in part.slices:
        yield Piece("weights", piece.name, piece.of(part.master), piece.shape, piece.region)
        for key, tensor in stored:
            name = f"{piece.name}/{key}"
            if tensor.dim():
                yield Piece("optimizer", name, piece.of(tensor), piece.shape, piece.region)
            elif piece.start == 0:
                yield Piece("optimizer", name, tensor, ())


def built_state(zero: Any, module: nn.Module) -> dict[int, dict[str, Any]]:
    """The optimizer's state of each group before its first update; mostly empty."""
    state = zero.optimizer.state
    kept = {p.index: copied(dict(state.get(p.master, {}))) for p in partitions(zero, module)}
    return {index: entries for index, entries in kept.items() if entries}


@dataclass(frozen=True)
class _Plan:
    """The entries of a checkpoint for one partition."""

    elements: dict[str, torch.dtype] = field(default_factory=dict)
    """The keys with a value an element, and the dtypes."""
    numbers: dict[str, Tensor] = field(default_factory=dict)
    """Numbers with one value for all, read already."""


@dataclass(frozen=True)
class Planned:
    """The entries that were read from a checkpoint before anything is changed."""

    parts: list[tuple[Partition, _Plan]]
    counted: list[dict[str, Any]]
    """The counts of the optimizer's groups."""
    stored: Mapping[str, Mapping[str, str]]


def plan_restore(reader: Reader, module: nn.Module, zero: Any, numbers: GroupNumbers) -> Planned:
    """Raises `CheckpointMismatch` or `CheckpointDamaged`, maybe on this rank alone: of the state it
    reads what is this rank's."""
    dtypes = {name: tensor.dtype for name, tensor in model_state.named_state(module).items()}
    model_state.check_same_model(reader, shapes(module), dtypes)
    check(reader, zero.optimizer, numbers.names, shapes(module))
    stored = _stored_state(reader)
    parts = [(part, _plan(part, stored, reader)) for part in partitions(zero, module)]
    return Planned(parts, numbers.read(reader), stored)


@torch.no_grad()
def restore(
    reader: Reader,
    module: nn.Module,
    zero: Any,
    planned: Planned,
    trained: frozenset[str],
    built: Mapping[int, Mapping[str, Any]],
) -> None:
    """Masters, moments, and what has no master, from any checkpoint; `publish` must follow.

    Reads this rank's ranges only. `built`: from `built_state`.
    """
    stored = planned.stored
    for part, plan in planned.parts:
        with in_memory(zero, part.index):
            for piece in part.slices:
                piece.of(part.master).copy_(reader.read("weights", piece.name, piece.region))
            state = zero.optimizer.state[part.master]
            filled = {
                key: _filled(zero.optimizer, key, dtype, part, stored, reader)
                for key, dtype in plan.elements.items()
            }
            entries = nested({**filled, **plan.numbers}, "") or copied(built.get(part.index, {}))
            if plan.numbers and "step" in entries:
                entries["step"] = _count(zero.optimizer, part, entries["step"])
            state.clear()
            state.update(entries)
    whole, ranges = _apart(module, [part for part, _ in planned.parts], trained)
    for piece, part_of_it in ranges:
        piece.of(part_of_it).copy_(reader.read("weights", piece.name, piece.region))
    for name, tensor in whole.items():
        tensor.copy_(reader.read("weights", name))


def _filled(
    optimizer: torch.optim.Optimizer,
    key: str,
    dtype: torch.dtype,
    part: Partition,
    stored: Mapping[str, Mapping[str, str]],
    reader: Reader,
) -> Tensor:
    """Return a tensor laid out like the master, with the stored values of each parameter. An
    existing tensor of the state is reused. A parameter that was never updated gets the values that
    the optimizer begins with."""
    present = optimizer.state[part.master].get(key)
    if isinstance(present, Tensor) and present.dim() and present.dtype == dtype:
        tensor = present
    else:
        tensor = torch.zeros_like(part.master, dtype=dtype, requires_grad=False)
    for piece in part.slices:
        if name := stored.get(piece.name, {}).get(key):
            piece.of(tensor).copy_(reader.read("optimizer", name, piece.region))
        else:
            fresh = fresh_state(optimizer, part.settings, piece.of(part.master))
            piece.of(tensor).copy_(fresh.get(key, torch.zeros(())))
    return tensor


def publish(zero: Any) -> None:
    """Give the module the weights of the masters. Called by all ranks."""
    if hasattr(zero, "update_lp_params"):
        zero.update_lp_params()
        return
    zero._partition_all_parameters()
    with torch.no_grad():
        for i in range(len(zero.fp16_groups)):
            with in_memory(zero, i):
                zero._reassign_or_swap_out_partitioned_parameters(i)


def _stored_state(reader: Reader) -> dict[str, dict[str, str]]:
    """Parameter -> key of its state, without a dtype -> name in the checkpoint."""
    stored: dict[str, dict[str, str]] = {}
    for name in reader.names("optimizer"):
        parameter, _, key = name.rpartition("/")
        if is_state(key):
            stored.setdefault(parameter, {})[without_dtype(key)] = name
    return stored


def _plan(part: Partition, stored: Mapping[str, Mapping[str, str]], reader: Reader) -> _Plan:
    plan = _Plan()
    for piece in part.slices:
        for key, name in stored.get(piece.name, {}).items():
            info = reader.info("optimizer", name)
            if info.shape == piece.shape and (piece.shape or not _is_number(key)):
                like = part.master.dtype if info.dtype.is_floating_point else info.dtype
                plan.elements[key] = dtype_of(name) or like
                continue
            if info.shape:
                raise CheckpointMismatch(
                    f"the optimizer state {name!r} has shape {info.shape}, its parameter "
                    f"{piece.shape}: it was written by an optimizer that does not update each "
                    "element by itself, which ZeRO cannot continue. Use the optimizer settings of "
                    "that run with cpu, ddp or fsdp, or start this one fresh with "
                    "resume.optimizer=fresh"
                )
            value = reader.read("optimizer", name)
            value = value.to(dtype_of(name) or value.dtype)
            if not key.endswith((":list", ":tuple")):
                nested({key: value}, f"{piece.name}/")  # raises unless it is a number
            if bool(plan.numbers.setdefault(key, value) != value):
                raise CheckpointMismatch(
                    f"the optimizer state {name!r} is {float(value)}, that of another parameter "
                    f"{float(plan.numbers[key])}: ZeRO keeps one number for all parameters of a "
                    "group. Give parameters that were trained for different times groups of their "
                    "own"
                )
    where = f"{part.slices[0].name}/" if part.slices else ""
    nested({**dict.fromkeys(plan.elements, torch.zeros(())), **plan.numbers}, where)  # may raise
    return plan


def _count(optimizer: torch.optim.Optimizer, part: Partition, step: Any) -> Any:
    """A number of steps as that optimizer keeps it: torch's and their subclasses in a tensor,
    DeepSpeed's in an int, others as it was saved."""
    if _is_from("deepspeed", optimizer, part):
        return int(step)
    if not _is_from("torch", optimizer, part):
        return step
    on_device = part.settings.get("fused") or part.settings.get("capturable")
    return torch.tensor(float(step), device=part.master.device if on_device else "cpu")


def _is_from(library: str, optimizer: torch.optim.Optimizer, part: Partition) -> bool:
    """True if a library has the class of a group's optimizer, or one that this derives from."""
    bases = type(models.kind_of(optimizer, part.settings)).__mro__
    own = bases[: bases.index(torch.optim.Optimizer)] if torch.optim.Optimizer in bases else bases
    return any(base.__module__.partition(".")[0] == library for base in own)


def _is_number(key: str) -> bool:
    return key == "step" or ":" in key

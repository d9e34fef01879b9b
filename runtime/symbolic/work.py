"""Counts what a step computes, moves in memory and sends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import flop_counter

from ..data.nested import tensors_of
from ..data.private_names import private_name
from .trace import Message, Operation

__all__ = ["Work"]

_COUNTED_AS = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "_scaled_dot_product_flash_attention_backward"
    ),
}
"""Operators without a formula in torch 2.8, and those with the same arguments that have one."""
_REPLACING = frozenset({"copy_", "fill_", "zero_"})
"""Operations that do not read the tensor that they change."""
_VIEWS = frozenset({"_unsafe_view"})
"""Operations that make views, besides those of which torch says so."""
_WITH_OTHERS = ("alltoall", "all_to_all", "send", "recv", "broadcast", "barrier")
"""Parts of the names of collectives whose results the next operation needs."""


class Work:
    """Measures the operations and messages of a step, while `counts` is True.

    FLOPs are those of `torch.utils.flop_counter`: of matrix products, convolutions and attention.
    """

    def __init__(self) -> None:
        self.counts = self.is_last = False

    def of(
        self, phase: str, func: Any, args: Any, kwargs: Any, result: Any
    ) -> Operation | Message | None:
        """Return the work of an operation of torch, which has run; None if it takes no time."""
        if not self.counts:
            return None
        if "c10d" in func.namespace:
            return self._message(phase, func, args, result)
        return self._operation(phase, func, args, kwargs, result)

    def _operation(
        self, phase: str, func: Any, args: Any, kwargs: Any, result: Any
    ) -> Operation | None:
        flops = 0
        formula = flop_counter.flop_registry.get(_counted_as(func.overloadpacket))
        if formula is not None:
            flops = formula(*args, **kwargs, out_val=result)
        moved = _moved_bytes(func, args, kwargs, result)
        new = _new_bytes(args, kwargs, result)
        if not flops and not moved and not new:
            return None
        first = next(tensors_of([args, kwargs, result]))
        return Operation(phase, self.is_last, first.dtype, flops, moved, new)

    def _message(self, phase: str, func: Any, args: Any, result: Any) -> Message | None:
        name = func.overloadpacket.__name__
        if name == "wait_tensor":
            return None
        num_bytes = max(sum(each.nbytes for each in tensors_of(part)) for part in (*args, result))
        overlaps = func.namespace == "c10d" and not any(part in name for part in _WITH_OTHERS)
        return Message(phase, self.is_last, name.strip("_"), num_bytes, _ranks_of(args), overlaps)


def _counted_as(operator: Any) -> Any:
    same = _COUNTED_AS.get(operator.__name__)
    return operator if same is None else getattr(torch.ops.aten, same)


def _moved_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes that an operation reads, and those that it writes."""
    name = func.overloadpacket.__name__
    if func.is_view or name in _VIEWS or "empty" in name:
        return 0
    arguments = func._schema.arguments
    values = [*args, *(kwargs.get(each.name) for each in arguments[len(args) :])]
    read, written = [], [result]
    for argument, value in zip(arguments, values, strict=True):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            written.append(value)
        if not (is_written and (argument.is_out or name in _REPLACING)):
            read.append(value)
    return _distinct_bytes(tensors_of(read)) + _distinct_bytes(tensors_of(written))


def _new_bytes(args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes of the result's memory that is not an argument's."""
    known = {id(each.untyped_storage()) for each in tensors_of([args, kwargs])}
    made = {id(each.untyped_storage()): each.untyped_storage() for each in tensors_of(result)}
    return sum(storage.nbytes() for key, storage in made.items() if key not in known)


def _distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of these tensors, each once; those that are repeated by strides once."""
    distinct = {id(each): each for each in tensors}.values()
    return sum(min(each.nbytes, each.untyped_storage().nbytes()) for each in distinct)


def _ranks_of(args: Any) -> tuple[int, ...]:
    """Return the ranks of the group among the arguments of a collective."""
    for value in reversed(args):
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
        if isinstance(value, str):  # the group comes after the name of a reduction
            resolve = private_name(
                "torch.distributed.distributed_c10d",
                "_resolve_process_group",
                purpose="counting the messages of a step",
            )
            return tuple(dist.get_process_group_ranks(resolve(value)))
    return tuple(range(dist.get_world_size()))

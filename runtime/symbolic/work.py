"""Counts what a step computes, moves in memory and sends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import flop_counter

from ..data.nested import tensors_of
from ..data.private_names import private_name

__all__ = ["Message", "Operation", "Work"]

_COUNTED_AS = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "_scaled_dot_product_flash_attention_backward"
    ),
}
"""Operators without a formula in torch 2.8, and those with the same arguments that have one."""
_WITH_OTHERS = ("alltoall", "all_to_all", "send", "recv", "broadcast", "barrier")
"""Parts of the names of collectives whose results the next operation needs."""


class Operation(NamedTuple):
    """An operation of a step."""

    phase: str
    is_last: bool
    """True in the last microbatch of an update, and in the update itself."""
    dtype: torch.dtype
    flops: int
    num_bytes: int
    """Bytes that are read and written; none if the result is a view."""


class Message(NamedTuple):
    """A collective of a step."""

    phase: str
    is_last: bool
    name: str
    """The operator's name without its namespace, such as `all_reduce`."""
    num_bytes: int
    """Bytes of the whole: of all parts that are gathered or scattered."""
    ranks: tuple[int, ...]
    overlaps: bool
    """True if forward and backward continue meanwhile, as with sums of gradients."""


class Work:
    """Lists the operations and messages of a step, while `counts` is True.

    FLOPs are those of `torch.utils.flop_counter`: of matrix products, convolutions and attention.
    """

    def __init__(self) -> None:
        self.counts = self.is_last = False
        self.operations: list[Operation] = []
        self.messages: list[Message] = []

    def add(self, phase: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add an operation of torch, which has run."""
        if self.counts and "c10d" in func.namespace:
            self._add_message(phase, func, args, result)
        elif self.counts:
            self._add_operation(phase, func, args, kwargs, result)

    def _add_operation(self, phase: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given, made = [*tensors_of([args, kwargs])], [*tensors_of(result)]
        name = func.overloadpacket.__name__
        flops = 0
        formula = flop_counter.flop_registry.get(_counted_as(func.overloadpacket))
        if formula is not None:
            flops = formula(*args, **kwargs, out_val=result)
        moved = 0 if func.is_view else _distinct_bytes([*given, *made])
        if flops or (moved and "empty" not in name):
            dtype = (given or made)[0].dtype
            self.operations.append(Operation(phase, self.is_last, dtype, flops, moved))

    def _add_message(self, phase: str, func: Any, args: Any, result: Any) -> None:
        name = func.overloadpacket.__name__
        if name == "wait_tensor":
            return
        num_bytes = max(sum(each.nbytes for each in tensors_of(part)) for part in (*args, result))
        overlaps = func.namespace == "c10d" and not any(part in name for part in _WITH_OTHERS)
        self.messages.append(
            Message(phase, self.is_last, name.strip("_"), num_bytes, _ranks_of(args), overlaps)
        )


def _counted_as(operator: Any) -> Any:
    same = _COUNTED_AS.get(operator.__name__)
    return operator if same is None else getattr(torch.ops.aten, same)


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

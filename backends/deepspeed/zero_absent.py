"""What an update of ZeRO leaves as it is: parameters that no rank has a gradient of."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...checkpoint.optimizer_entries import copied
from .zero_state import Partition, Slice, cuts_weights, in_memory, partitions, publish


@contextmanager
def left_alone(zero: Any, module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Within the block an update leaves these parameters, which no rank has a gradient of,
    unchanged: DeepSpeed updates them by a gradient of zero, to which weight decay and moments would
    add. What it counts for a group goes on, unless no gradient reaches any of that."""
    kept = [_copied(zero, part, names) for part in partitions(zero, module)]
    counts = _counts(zero, module, names)
    yield
    for part, copies in zip(partitions(zero, module), kept, strict=True):
        with in_memory(zero, part.index):
            for piece, key, copy in copies:
                held = part.master if key is None else zero.optimizer.state[part.master][key]
                piece.of(held).copy_(copy)
            if part.index in counts:
                _count_again(zero.optimizer.state[part.master], counts[part.index])
    publish(zero)


def _counts(zero: Any, module: nn.Module, names: Collection[str]) -> dict[int, dict[str, Any]]:
    """What is counted for each group of parameters that are all among these, on all ranks alike."""
    of = {parameter: name for name, parameter in module.named_parameters()}
    groups = zero.fp16_groups if cuts_weights(zero) else zero.bit16_groups
    return {
        part.index: copied(
            {
                key: value
                for key, value in zero.optimizer.state.get(part.master, {}).items()
                if _is_count(value)
            }
        )
        for part in partitions(zero, module)
        if all(of[parameter] in names for parameter in groups[part.index])
    }


def _count_again(state: dict[str, Any], counts: Mapping[str, Any]) -> None:
    """As it was; from zero on, where there was none."""
    for key, value in state.items():
        if _is_count(value):
            state[key] = counts.get(key, value * 0)


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and not value.dim())


def _copied(
    zero: Any, part: Partition, names: Collection[str]
) -> list[tuple[Slice, str | None, Tensor]]:
    """Of the master (None), and of each entry of the optimizer's state with a value an element."""
    with in_memory(zero, part.index):
        state = zero.optimizer.state.get(part.master, {})
        held = {None: part.master} | {
            key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim()
        }
        return [
            (piece, key, piece.of(tensor).clone())
            for piece in part.slices
            if piece.name in names
            for key, tensor in held.items()
        ]

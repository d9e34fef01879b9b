"""Parameters without a gradient: an update of ZeRO neither changes them, nor counts what DeepSpeed
keeps of their earlier gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.optimizer_entries import copied
from .twins import fresh_state, is_count
from .zero_state import Partition, Slice, in_memory, partitions, partitions_weights, publish


@contextmanager
def left_alone(zero: Any, module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Within the block an update leaves these parameters, which no rank has a gradient of,
    unchanged: DeepSpeed updates them by a gradient of zero, to which weight decay and moments would
    add. State that the update makes is as the optimizer begins it. A count that the optimizer
    keeps for a group still increases, unless no parameter of the group has a gradient."""
    kept = [_copied(zero, part, names) for part in partitions(zero, module)]
    counts = _counts(zero, module, names)
    yield
    for part, copies in zip(partitions(zero, module), kept, strict=True):
        with in_memory(zero, part.index):
            state = zero.optimizer.state.get(part.master, {})
            for piece, weights, before in copies:
                piece.of(part.master).copy_(weights)
                present = _by_element(state)
                if present.keys() - before.keys():  # the update has made it
                    before = fresh_state(zero.optimizer, part.settings, weights) | before
                for key, held in present.items():
                    piece.of(held).copy_(before.get(key, torch.zeros(())))
            if part.index in counts:
                _count_again(state, counts[part.index])
    publish(zero)


def forget_gradients(zero: Any) -> None:
    """Clear what stage 3 keeps of the gradients of an update that has ended. DeepSpeed overwrites
    them in the first microbatch of the next update. It would count those of a parameter that is no
    longer used in the norm, and add to those of one that is first used in a later microbatch."""
    if (kept := getattr(zero, "grad_partitions_flat_buffer", None)) is not None:
        kept.zero_()


def _counts(zero: Any, module: nn.Module, names: Collection[str]) -> dict[int, dict[str, Any]]:
    """Return step counts of the groups whose parameters are all in `names`; equal on all ranks."""
    of = {parameter: name for name, parameter in module.named_parameters()}
    groups = zero.fp16_groups if partitions_weights(zero) else zero.bit16_groups
    return {
        part.index: copied(
            {
                key: value
                for key, value in zero.optimizer.state.get(part.master, {}).items()
                if is_count(value)
            }
        )
        for part in partitions(zero, module)
        if all(of[parameter] in names for parameter in groups[part.index])
    }


def _count_again(state: dict[str, Any], counts: Mapping[str, Any]) -> None:
    """Restore the step counts; a count that did not exist before starts at zero."""
    for key, value in state.items():
        if is_count(value):
            state[key] = counts.get(key, value * 0)


def _by_element(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The entries of an optimizer's state that have a value an element."""
    return {key: held for key, held in state.items() if isinstance(held, Tensor) and held.dim()}


def _copied(
    zero: Any, part: Partition, names: Collection[str]
) -> list[tuple[Slice, Tensor, dict[str, Tensor]]]:
    """Copies of this rank's stretches of these parameters, and of their state as far as there is
    any."""
    with in_memory(zero, part.index):
        state = _by_element(zero.optimizer.state.get(part.master, {}))
        return [
            (
                piece,
                piece.of(part.master).clone(),
                {key: piece.of(held).clone() for key, held in state.items()},
            )
            for piece in part.slices
            if piece.name in names
        ]

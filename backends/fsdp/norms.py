"""The norm of a gradient that is sharded over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..common import stepping
from ..process_group.collectives import keep_for_a_while
from . import dtensor

__all__ = ["global_norm"]


def global_norm(
    parameters: Sequence[nn.Parameter], replicas: Sequence[int], home: torch.device
) -> Tensor:
    """L2 norm of the whole gradient, on all ranks. `replicas`: of each parameter, how many ranks
    hold this part of it; 0: every rank has the whole."""
    whole: list[Tensor] = []
    sharded: dict[int, list[Tensor]] = {}
    for parameter, number in zip(parameters, replicas, strict=True):
        if parameter.grad is not None:
            held = sharded.setdefault(number, []) if number else whole
            held.append(dtensor.own_part(parameter.grad))
    square = torch.zeros((), dtype=torch.float64, device=home)
    for number, parts in sharded.items():  # every replica of a part counts it once
        square += stepping.global_norm(parts).to(home).double().square() / number
    dist.all_reduce(keep_for_a_while(square))
    if whole:
        square += stepping.global_norm(whole).to(home).double().square()
    return square.sqrt().float()

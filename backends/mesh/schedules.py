"""Microbatches that are in flight at once, in the order of a schedule of torch's.

https://docs.pytorch.org/docs/stable/distributed.pipelining.html. Gradients are sums (`scale_grads`
is off: by default they are divided by the number of microbatches), and shapes are known before: a
buffer that a shorter message arrives in would be computed on as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .line import Line

__all__ = ["Shape", "fly"]


class Shape(NamedTuple):
    """Of an activation."""

    sizes: torch.Size
    dtype: torch.dtype

    def example(self, device: torch.device) -> Tensor:
        """One that is not looked into."""
        return torch.empty(self.sizes, dtype=self.dtype, device=device, requires_grad=True)


class _Stage(nn.Module):
    def __init__(self, compute: Callable[[int, Tensor | None, int], Tensor], stage: int) -> None:
        super().__init__()
        self.compute, self.stage = compute, stage

    def forward(self, received: Tensor, *, index: Tensor) -> Tensor:
        return self.compute(self.stage, received if self.stage else None, int(index))


def fly(
    schedule: str,
    compute: Callable[[int, Tensor | None, int], Tensor],
    own_stages: Sequence[int],
    num_stages: int,
    num_microbatches: int,
    shapes: Sequence[Shape],
    line: Line,
) -> None:
    """Forward and backward of that many microbatches. `compute(stage, received, index)` is the
    forward of one of them in one of this rank's stages, by the last stage to a loss of shape (1,).
    `shapes`: of what each stage but the first receives."""
    from torch.distributed.pipelining import PipelineStage

    numbers = torch.arange(num_microbatches)
    loss = torch.empty(1, device=line.device, requires_grad=True)
    stages = []
    for stage in own_stages:
        received = shapes[stage - 1].example(line.device) if stage else numbers[:1]
        last = stage == num_stages - 1
        made = loss if last else shapes[stage].example(line.device)
        part = _Stage(compute, stage)
        stages.append(
            PipelineStage(part, stage, num_stages, line.device, received, made, group=line.group)
        )
    kind, single = _kind(schedule, num_microbatches, num_stages, line.size)
    run: Any = kind(
        stages[0] if single else stages,
        num_microbatches,
        loss_fn=lambda made, target: made.sum(),
        scale_grads=False,
    )
    given = (numbers,) if own_stages[0] == 0 else ()
    target = numbers if own_stages[-1] == num_stages - 1 else None
    try:
        run.step(*given, index=numbers, target=target)
    except RuntimeError as error:
        # torch tells of the arguments; what went wrong is in the cause
        if "failed to run" in str(error) and error.__cause__ is not None:
            raise error.__cause__ from None
        raise


def _kind(
    schedule: str, num_microbatches: int, num_stages: int, num_ranks: int
) -> tuple[Any, bool]:
    """The schedule's class, and whether a rank has one stage in it. Where microbatches are too few
    for one, or do not divide, it is the one that takes any number."""
    from torch.distributed import pipelining

    if schedule == "interleaved":
        rounds = num_microbatches // num_ranks
        fits = rounds and num_microbatches % rounds == 0
        return (pipelining.ScheduleInterleaved1F1B if fits else pipelining.ScheduleLoopedBFS), False
    if schedule == "1f1b" and num_microbatches >= num_stages:
        return pipelining.Schedule1F1B, True
    return pipelining.ScheduleGPipe, True

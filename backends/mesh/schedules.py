"""Microbatches that are in flight at once, in the order of one of torch's schedules.

https://docs.pytorch.org/docs/stable/distributed.pipelining.html. Gradients are sums (`scale_grads`
is off: by default they are divided by the number of microbatches). Shapes must be known before a
run, since torch does not check them: a shorter message would leave the rest of its buffer as it
was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .p2p import PipelineP2P

__all__ = ["ActivationShape", "run_schedule"]


class ActivationShape(NamedTuple):
    """Shape and dtype of an activation."""

    sizes: torch.Size
    dtype: torch.dtype

    def example(self, device: torch.device) -> Tensor:
        """Return an activation without meaningful values."""
        return torch.empty(self.sizes, dtype=self.dtype, device=device, requires_grad=True)


class _Stage(nn.Module):
    def __init__(self, compute: Callable[[int, Tensor | None, int], Tensor], stage: int) -> None:
        super().__init__()
        self.compute, self.stage = compute, stage

    def forward(self, received: Tensor, *, index: Tensor) -> Tensor:
        return self.compute(self.stage, received if self.stage else None, int(index))


def run_schedule(
    schedule: str,
    compute: Callable[[int, Tensor | None, int], Tensor],
    own_stages: Sequence[int],
    num_stages: int,
    num_microbatches: int,
    shapes: Sequence[ActivationShape],
    p2p: PipelineP2P,
) -> None:
    """Run forward and backward of `num_microbatches`. `compute(stage, received, index)` is the
    forward of one microbatch in one of this rank's stages; the last stage returns a loss of shape
    (1,). `shapes`: of the activations between stages, by the stage that sends them.
    """
    from torch.distributed.pipelining import PipelineStage

    indices = torch.arange(num_microbatches)
    loss = torch.empty(1, device=p2p.device, requires_grad=True)
    stages = []
    for stage in own_stages:
        received = shapes[stage - 1].example(p2p.device) if stage else indices[:1]
        last = stage == num_stages - 1
        output = loss if last else shapes[stage].example(p2p.device)
        part = _Stage(compute, stage)
        stages.append(
            PipelineStage(part, stage, num_stages, p2p.device, received, output, group=p2p.group)
        )
    kind, one_stage = _schedule_class(schedule, num_microbatches, num_stages, p2p.size)
    run: Any = kind(
        stages[0] if one_stage else stages,
        num_microbatches,
        loss_fn=lambda output, target: output.sum(),
        scale_grads=False,
    )
    inputs = (indices,) if own_stages[0] == 0 else ()
    target = indices if own_stages[-1] == num_stages - 1 else None
    try:
        run.step(*inputs, index=indices, target=target)
    except RuntimeError as error:
        # torch's error shows the arguments; its cause says what went wrong
        if "failed to run" in str(error) and error.__cause__ is not None:
            raise error.__cause__ from None
        raise


def _schedule_class(
    schedule: str, num_microbatches: int, num_stages: int, num_ranks: int
) -> tuple[Any, bool]:
    """Return the schedule's class, and whether a rank has one stage in it. If there are too few
    microbatches for a schedule, or they do not divide, take the class that allows any number.
    """
    from torch.distributed import pipelining

    if schedule == "interleaved":
        rounds = num_microbatches // num_ranks
        fits = rounds and num_microbatches % rounds == 0
        return (pipelining.ScheduleInterleaved1F1B if fits else pipelining.ScheduleLoopedBFS), False
    if schedule == "1f1b" and num_microbatches >= num_stages:
        return pipelining.Schedule1F1B, True
    return pipelining.ScheduleGPipe, True

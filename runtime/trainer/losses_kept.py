"""The losses since the last log, kept where the other ranks find them when this one dies.

Ranks add up their losses when they are logged, and those of a dead rank would be missing then. So
each rank notes them on the launcher's board (`lost_ranks`), on the host, without communication.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import lost_ranks
from ..kernel.loop import TrainLoop
from ..kernel.progress import Window
from ..lost_ranks import Noted

__all__ = ["continue_window", "losses_of_all", "note", "note_begun_steps"]


def note(loop: TrainLoop, begun: float = 0.0) -> None:
    """Note the losses of this rank since the last log. `begun`: those of the step that has begun.
    On an accelerator only the step is noted: the host would have to wait for losses."""
    found = lost_ranks.board()
    if found is None:
        return
    (board, number), noted = found, Noted(os.getpid(), loop.progress.step, -1)
    if loop.session.world.device.type == "cpu":
        losses = float(loop.window.loss_sum)
        noted = replace(noted, first_step=loop.window.first_step, losses=losses, begun=begun)
    board.write(number, noted)


def note_begun_steps(loop: TrainLoop) -> None:
    """From now on note the loss of each microbatch before its backward, in which ranks wait for
    each other: an update may be applied on some ranks and not on others."""
    backward, begun = loop.stepper.backward, [-1.0, 0.0]

    def noting(loss: Tensor, weight: float) -> Tensor:
        step = loop.progress.step
        if begun[0] != step:
            begun[:] = step, 0.0
        if loop.session.world.device.type == "cpu":
            begun[1] += float(loss.detach()) * weight
            note(loop, begun[1])
        return backward(loss, weight)

    loop.stepper.backward = noting  # type: ignore[method-assign]


def losses_of_all(
    step: int, first_step: int, known: Mapping[int, float | None], members: Sequence[int]
) -> tuple[list[float | None], str]:
    """Return the losses from `first_step` to `step` of each of the members, and the numbers of the
    members whose losses are not known. The numbers are those that ranks were launched with.
    `known`: the losses of those that are alive and have done the step; None: not finite."""
    found, missing = dict(known), []
    board = lost_ranks.board()
    for number in members:
        if number in found:
            continue
        noted = None if board is None else board[0].read(number)
        losses = None if noted is None else noted.until(step, first_step)
        if losses is None:
            missing.append(number)
        else:
            found[number] = losses if math.isfinite(losses) else None
    return [found[number] for number in sorted(found)], ", ".join(map(str, missing))


def continue_window(loop: TrainLoop, before: TrainLoop | None, grad_norm: float) -> None:
    """Continue the steps since the last log in a loop that was restored. `before`, the loop until
    then, has their times, and the restored one the losses of all ranks; None on a rank that has
    joined."""
    losses, first = loop.window.loss_sum, loop.window.first_step
    window = None if before is None else before.window
    if window is None or window.first_step + window.empty_steps != first:
        # this rank has logged them already, and another has not: it has no times of them any more
        window = Window(replace(loop.progress, step=first))
    dtype = getattr(window.loss_sum, "dtype", torch.float32)
    window.loss_sum = torch.tensor(losses, dtype=dtype, device=loop.session.world.device)
    window.add(torch.zeros_like(window.loss_sum), torch.tensor(grad_norm))
    loop.window = window

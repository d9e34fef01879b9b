"""A job of two processes: memory runs out on one of them alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from side_by_side import arguments, samples
from test_compat_memory_limits import Cramped, Shrink
from torch import Tensor

from drivetrain import compat
from drivetrain.conformance.bench import Bench


class CrampedEvaluation(Cramped):
    """A model that has as little memory in evaluation as in training."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if not self.training and len(x) > self.room:
            raise torch.OutOfMemoryError(f"CUDA out of memory. {len(x)} samples are too many")
        return super().forward(x, labels)


class Fails(compat.TrainerCallback):
    """Raises in the second step, as the user's code might."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise ValueError("a bad sample")


def alone(bench: Bench, *, folder: str, evaluates: bool, fails: bool, **asked: Any) -> None:
    """Write the error that ends training on each rank to a file."""
    torch.manual_seed(1)
    if evaluates:
        asked |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
    args = arguments(compat, folder, max_steps=5, stall_seconds=6, **asked)
    model = CrampedEvaluation() if evaluates else Cramped()
    callback = Fails() if fails else Shrink(2, room=1)
    callbacks = [callback] if args.process_index == 1 else []
    data = samples(24)
    trainer = compat.Trainer(
        model, args, train_dataset=data, eval_dataset=data, callbacks=callbacks
    )
    reported = "it trained"
    try:
        trainer.train()
    except Exception as error:
        reported = f"{type(error).__name__}: {error}"
    Path(folder, str(args.process_index)).write_text(reported)
    if args.process_index == 1:
        os._exit(1)  # as an uncaught error does

"""The run of `runs`, by `drivetrain.compat`'s Trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .runs import JOURNAL, SETTINGS, Journal, Run, build, dying


class Net(nn.Module):
    """A model that returns its loss, as a Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.inner(x) - labels).square().mean()}


def points() -> list[dict[str, Tensor]]:
    inputs = torch.randn(101, 8, generator=torch.Generator().manual_seed(3))
    return [{"x": row, "labels": row.sum(0, keepdim=True)} for row in inputs]


def train_with_compat(
    run: Run,
    out: Path,
    environment: dict[str, str],
    resume: str | None = None,
    **options: Any,
) -> None:
    """Train like `train` of `runs`, but with `checkpoint-N` folders in `out` itself. `resume`: the
    checkpoint to resume from.
    """
    os.environ.update(environment)
    from drivetrain import compat
    from drivetrain.compat.names import get_last_checkpoint

    rank = int(environment.get("RANK", "0"))
    notes = Journal(out / JOURNAL)

    class Notes(compat.TrainerCallback):
        """A callback that writes down what the Journal of `runs` does."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step and rank == 0:
                notes.write({"resumed": state.global_step, "notes": []})

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            if "loss" in logs and rank == 0:
                figures = {"loss": logs["loss"], "grad_norm": float(logs["grad_norm"])}
                notes.write({"step": state.global_step, **figures})

    args = compat.TrainingArguments(
        output_dir=str(out),
        backend=run.backend,
        use_cpu=True,
        max_steps=SETTINGS.steps,
        per_device_train_batch_size=4 // run.num_ranks,
        gradient_accumulation_steps=2,
        logging_steps=SETTINGS.log_every,
        save_steps=1,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    torch.manual_seed(5)
    trainer = compat.Trainer(Net(), args, train_dataset=points(), callbacks=[Notes()])
    with dying(run, rank, out):
        newest = get_last_checkpoint(str(out)) is not None
        trainer.train(resume_from_checkpoint=resume or newest)

"""Whole runs of the kernel's `fit` on the driver, as jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ..kernel.errors import OutOfMemory
from ..kernel.events import Evaluated, Logged, StepEnded, StepSkipped
from .bench import Bench
from .problems import KINDS_OF_DATA, PROBLEMS, Sample, Samples

__all__ = ["run"]


class Recorder:
    """An observer that keeps the events that laws ask for."""

    def __init__(self) -> None:
        self.kept: dict[str, list[dict[str, Any]]] = {"logged": [], "skipped": [], "evaluated": []}
        self.ids: list[int] = []
        self.ids_by_step: list[list[int]] = []

    def __call__(self, event: object) -> None:
        match event:
            case Logged():
                self.kept["logged"].append(asdict(event))
            case StepSkipped():
                self.kept["skipped"].append(asdict(event))
            case Evaluated():
                self.kept["evaluated"].append(asdict(event))
            case StepEnded():
                self.ids_by_step.append(sorted(set(self.ids)))
                self.ids = []


def run(
    bench: Bench,
    *,
    problem: str,
    samples: int,
    settings: dict[str, Any],
    poison: int | None = None,
    evaluate: Sequence[int] = (),
    data: str = "indexed",
    out: str | None = None,
    resume: str | None = None,
    room: int | None = None,
) -> dict[str, Any]:
    """Job that calls `fit`, with evaluation data sets of the sizes `evaluate`, on `data`, a name in
    `KINDS_OF_DATA`. Returns the events `logged`, `skipped` and `evaluated`, the samples of each
    step on this rank, the checkpoint, and the weights at the end.

    `room`: memory suffices for this many rows; the third step exceeds it. `error` is the message of
    the error that ended the run for lack of memory, if any.
    """
    chosen, recorder = PROBLEMS[problem], Recorder()

    def loss(module: nn.Module, batch: Sample) -> Tensor:
        recorder.ids += batch["id"].tolist()
        result = chosen.loss(module, batch)
        if room is not None and len(batch["id"]) > room and len(recorder.ids_by_step) >= 2:
            raise torch.OutOfMemoryError(f"room for {room} rows")
        return result

    def whole_weights(module: nn.Module) -> dict[str, Tensor]:
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
        return {name: tensor.detach().cpu().clone() for name, tensor in named}

    try:
        result = bench.fit(
            chosen.recipe(
                loss=loss,
                train_data=KINDS_OF_DATA[data](Samples(problem, samples, poison)),
                eval_data={str(size): Samples(problem, size) for size in evaluate},
            ),
            settings,
            out=out,
            resume=resume,
            observers=[recorder],
            finish=whole_weights,
        )
    except OutOfMemory as error:
        return {**recorder.kept, "ids": recorder.ids_by_step, "error": str(error)}
    return {
        **recorder.kept,
        "ids": recorder.ids_by_step,
        "checkpoint": str(result.checkpoint),
        "weights": result.finish,
    }

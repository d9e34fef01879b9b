"""`drivetrain predict`: a run's outputs for each sample of data, into a file."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ..kernel.errors import RecipeError, printable
from ..trainer.predict import predict as predict_samples
from ..trainer.predictions import Chunk
from .commands.options import print_json
from .failure import rank
from .prediction_files import check_output, prediction_file
from .run_request import LoadedRun, RunRequest, on_ranks

__all__ = ["PredictRequest", "predict"]

TRAIN = "train_data"


@dataclass(frozen=True, kw_only=True)
class PredictRequest(RunRequest):
    """What was asked for on the command line; None where nothing was said."""

    out: Path
    data: str | None
    """Of the recipe's `eval_data`, or `train_data`."""
    padding: float
    json: bool


def predict(request: PredictRequest) -> int:
    """Predict, or launch the ranks that do; the exit code. Raises `DrivetrainError`."""
    check_output(request.out)
    return on_ranks(request, lambda run: _predict(request, run))


def _predict(request: PredictRequest, run: LoadedRun) -> int:
    name, data = _chosen(request.data, run)
    counted = _Counted()
    began = time.perf_counter()
    with ExitStack() as stack:
        if rank() == 0:
            counted.write = stack.enter_context(prediction_file(request.out))
        predict_samples(
            run.recipe,
            data,
            run.earlier.source,
            forward=run.recipe_file.predict,
            settings=run.resolved.settings,
            backend=run.driver.name,
            backend_options=run.resolved.backend_options,
            padding=request.padding,
            ranks=[0],
            receive=counted,
        )
    record = {
        "out": str(request.out),
        "data": name,
        "samples": counted.samples,
        "columns": counted.columns,
        "seconds": time.perf_counter() - began,
    }
    if rank() == 0 and request.json:
        print_json(record)
    elif rank() == 0:
        told = f"{counted.samples} samples of {name} in {record['seconds']:.1f} s"
        typer.echo(printable(f"{request.out}: {told}"))
    return 0


class _Counted:
    """Takes chunks, and hands them on to be written."""

    def __init__(self) -> None:
        self.samples = 0
        self.columns: dict[str, str] = {}
        self.write: Any = None

    def __call__(self, chunk: Chunk) -> None:
        self.samples += chunk.num_samples
        self.columns = self.write(chunk)


def _chosen(name: str | None, run: LoadedRun) -> tuple[str, Any]:
    """The data to predict for, and their name."""
    path, sets = run.recipe_file.path, dict(run.recipe.eval_data)
    if name is None and len(sets) == 1:
        return next(iter(sets.items()))
    sets[TRAIN] = run.recipe.train_data
    if name in sets and sets[name] is not None:
        return name, sets[name]
    known = ", ".join(key for key, data in sets.items() if data is not None)
    if name is None:
        raise RecipeError(f"say with --data which data of {path} to predict for: {known}")
    raise RecipeError(f"{path} has no data {name!r}; give --data one of {known}")

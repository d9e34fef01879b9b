"""`drivetrain predict`: writes a run's outputs for each sample of data to a file."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ...kernel.errors import RecipeError, printable
from ...trainer.predict import predict as predict_samples
from ...trainer.predictions import Chunk
from ..process.outcomes import rank
from .prediction_files import check_output, prediction_file
from .run_request import LoadedRun, RunRequest, on_ranks

__all__ = ["PredictRequest", "predict"]

TRAIN = "train_data"


@dataclass(frozen=True, kw_only=True)
class PredictRequest(RunRequest):
    """Arguments of the command line; None where an argument was left out."""

    out: Path
    data: str | None
    """Name of one of the data sets in the recipe's `eval_data`, or `train_data`."""
    padding: float
    json: bool


def predict(request: PredictRequest) -> int:
    """Predict, or launch the ranks that do; return the exit code. Raises `DrivetrainError`."""
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
        typer.echo(json.dumps(record, indent=1))
    elif rank() == 0:
        done = f"{counted.samples} samples of {name} in {record['seconds']:.1f} s"
        typer.echo(printable(f"{request.out}: {done}"))
    return 0


class _Counted:
    """Counts the samples of chunks, and passes the chunks to `write`."""

    def __init__(self) -> None:
        self.samples = 0
        self.columns: dict[str, str] = {}
        self.write: Any = None

    def __call__(self, chunk: Chunk) -> None:
        self.samples += chunk.num_samples
        self.columns = self.write(chunk)


def _chosen(name: str | None, run: LoadedRun) -> tuple[str, Any]:
    """Return the name of the data to predict for, and the data."""
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

"""`drivetrain evaluate`: measures the checkpoints of a run on any driver, also while it trains."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ...checkpoint import checkpoints_of, is_checkpoint, list_checkpoints, storage_of
from ...checkpoint.catalog import checkpoint_path, step_of
from ...kernel.errors import CheckpointDamaged, CheckpointNotFound, RecipeError, StorageFailed
from ...kernel.events import Evaluated, Warned
from ...kernel.paths import Place, place
from ...run.record_file import RecordFile
from ...run.records import Record, record_of, to_line
from ...run.run_files import append
from ...run.run_folder import METRICS, locate, records_folder
from ...run.watch import print_json, print_lines
from ...trainer.inference import Inference, prepared
from ...trainer.start_checks import on_rank_0
from ..process.outcomes import rank
from .run_request import LoadedRun, RunRequest, on_ranks

__all__ = ["EvaluateRequest", "evaluate"]


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest(RunRequest):
    """Arguments of the command line; None where an argument was left out."""

    every: bool
    """True for all checkpoints, False for the newest."""
    follow: float | None
    """Seconds between looks for new checkpoints until the run has ended; None: do not wait."""
    json: bool


def evaluate(request: EvaluateRequest) -> int:
    """Measure, or launch the ranks that do; return the exit code. Raises `DrivetrainError`."""
    return on_ranks(request, lambda run: _evaluate(request, run))


def _evaluate(request: EvaluateRequest, run: LoadedRun) -> int:
    earlier, driver, recipe, resolved = run.earlier, run.driver, run.recipe, run.resolved
    if not recipe.eval_data:
        file = run.recipe_file.path
        raise RecipeError(f"{file} has no eval_data to measure: give its Recipe some")
    show = print_json() if request.json else print_lines
    with prepared(recipe, resolved.settings, driver.name, resolved.backend_options) as inference:
        for path in _paths(request, earlier.source, inference):
            try:
                records = _measured(inference, path, driver.name)
            except (CheckpointNotFound, CheckpointDamaged, StorageFailed) as error:
                if request.follow is None or storage_of(path).exists(path):
                    raise
                gone = f"{path.name} was removed before it had been evaluated: {error}"
                records = [record_of(Warned(gone))]
            if rank() == 0:
                for record in records:
                    show(record)
                _keep(earlier.folder, records)
    return 0


def _measured(inference: Inference, path: Place, driver: str) -> list[Record]:
    began = time.perf_counter()
    inference.load(path)
    metrics = inference.evaluate()
    seconds = (time.perf_counter() - began) / len(metrics)
    step = step_of(path) or 0
    return [
        {**record_of(Evaluated(step, name, each, seconds)), "evaluated_on": driver}
        for name, each in metrics.items()
    ]


def _keep(run: Place, records: Sequence[Record]) -> None:
    """Append the results to the metrics of the run, if those are on this machine."""
    path = records_folder(run) / METRICS
    lines = [to_line(record) for record in records if record["event"] == "evaluated"]
    if lines and path.is_file():
        append(path, "".join(lines))


def _paths(request: EvaluateRequest, source: Place, inference: Inference) -> Iterator[Place]:
    """Yield the checkpoints to measure, in the order of their steps, equal on all ranks."""
    if is_checkpoint(source) or not (request.every or request.follow is not None):
        yield place(on_rank_0(inference.session, lambda: str(locate(source))))
        return
    folder, metrics = checkpoints_of(source), records_folder(source.parent) / METRICS
    done: set[str] = set()
    reader = _MetricsReader(metrics)
    if request.follow is not None:  # an earlier call may have measured some
        reader.read()
        done |= {checkpoint_path(folder, step).name for step in reader.steps_evaluated}
    while True:
        names, ended = on_rank_0(inference.session, lambda: _look(folder, reader, done))
        for name in names:
            done.add(name)
            yield folder / name
        if request.follow is None or (ended and not names):
            return
        if not names:
            time.sleep(request.follow)


def _look(folder: Place, reader: _MetricsReader, done: set[str]) -> tuple[list[str], bool]:
    """Return the checkpoints that are not in `done`, and True if the run has ended. The end is
    checked first.
    """
    reader.read()
    ended = reader.ended
    names = [found.folder.name for found in list_checkpoints(folder).complete]
    return [name for name in names if name not in done], ended


class _MetricsReader:
    """Reads a run's metrics, each line once."""

    def __init__(self, metrics: Path) -> None:
        self.ended = False
        self.steps_evaluated: set[int] = set()
        """Steps that this command has evaluated, also in earlier calls."""
        self._metrics, self._file = metrics, RecordFile(metrics)

    def read(self) -> None:
        """Read the lines that were added."""
        if not self._metrics.is_file():
            return
        if self._file.was_replaced():
            self._file = RecordFile(self._metrics)
        for record in chain.from_iterable(self._file.new()):
            if record["event"] in ("run_started", "run_ended"):
                self.ended = record["event"] == "run_ended"
            elif record["event"] == "evaluated" and "evaluated_on" in record:
                self.steps_evaluated.add(record["step"])

"""`drivetrain evaluate`: the checkpoints of a run are measured, on any driver, also while it goes
on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import checkpoints_of, is_checkpoint, list_checkpoints, storage_of
from ..checkpoint.catalog import checkpoint_path, step_of
from ..kernel.errors import CheckpointDamaged, CheckpointNotFound, RecipeError, StorageFailed
from ..kernel.events import Evaluated, Warned
from ..kernel.paths import Place, place
from ..trainer.inference import Inference, prepared
from ..trainer.start_checks import on_rank_0
from .checkpoints import locate
from .failure import rank
from .records import Record, read_records, record_of, to_line
from .run_files import append
from .run_folder import METRICS, records_folder
from .run_request import LoadedRun, RunRequest, on_ranks
from .watch import print_json, print_lines

__all__ = ["EvaluateRequest", "evaluate"]


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest(RunRequest):
    """What was asked for on the command line; None where nothing was said."""

    every: bool
    """All checkpoints; else the newest."""
    follow: float | None
    """Seconds between looks for another one, until the run has ended; None: no more looks."""
    json: bool


def evaluate(request: EvaluateRequest) -> int:
    """Measure, or launch the ranks that do; the exit code. Raises `DrivetrainError`."""
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
    """In the metrics of the run, if they are on this machine."""
    path = records_folder(run) / METRICS
    lines = [to_line(record) for record in records if record["event"] == "evaluated"]
    if lines and path.is_file():
        append(path, "".join(lines))


def _paths(request: EvaluateRequest, source: Place, inference: Inference) -> Iterator[Place]:
    """Checkpoints to measure, in the order of their steps, on all ranks alike."""
    if is_checkpoint(source) or not (request.every or request.follow is not None):
        yield place(on_rank_0(inference.session, lambda: str(locate(source))))
        return
    folder, metrics = checkpoints_of(source), records_folder(source.parent) / METRICS
    done: set[str] = set()
    if request.follow is not None:  # an earlier call may have begun to
        done |= {checkpoint_path(folder, step).name for step in _steps_evaluated(metrics)}
    while True:
        names, ended = on_rank_0(inference.session, lambda: _look(folder, metrics, done))
        for name in names:
            done.add(name)
            yield folder / name
        if request.follow is None or (ended and not names):
            return
        if not names:
            time.sleep(request.follow)


def _look(folder: Place, metrics: Path, done: set[str]) -> tuple[list[str], bool]:
    """Those that are new; and that the run has ended, which is looked at first."""
    records = read_records(metrics)
    ended = [r["event"] for r in records if r["event"] in ("run_started", "run_ended")][-1:]
    names = [found.folder.name for found in list_checkpoints(folder).complete]
    return [name for name in names if name not in done], ended == ["run_ended"]


def _steps_evaluated(metrics: Path) -> set[int]:
    """By this command, as the metrics tell."""
    return {
        record["step"]
        for record in read_records(metrics)
        if record["event"] == "evaluated" and "evaluated_on" in record
    }

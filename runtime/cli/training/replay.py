"""`drivetrain replay`: trains a recorded step again from the checkpoint before it, and compares."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoint import checkpoints_of, list_checkpoints
from ...checkpoint.catalog import step_of
from ...kernel.errors import DrivetrainError, OutputError, printable
from ...kernel.paths import Place, place
from ...run.output import write_now
from ...run.parted import Comparison, Side, compare_runs, compare_sides, read_side
from ...run.parted_checkpoints import differing_tensors
from ...run.recorded_steps import RecordedStep
from ...run.replayed import ReplayRecorder, checkpoint_before, recorded_at, summary
from ...run.run_folder import find_earlier, read_config, records_folder
from ...run.shown_config import ShownConfig
from ...trainer.fit import fit
from ...trainer.setting_values import flatten, override
from ..process.outcomes import rank
from ..settings.resolve_settings import COMMAND_LINE, Resolved
from .run_request import LoadedRun, RunRequest, on_ranks
from .step_dump import StepDump

__all__ = ["ReplayRequest", "replay"]

_LEFT_OUT: Mapping[str, Any] = {
    "evaluate.at_end": False,
    "evaluate.sanity_check": False,
    "stop.metric": None,
    "digests": "weights",
    "preemption_notice": (),
}
"""Settings of a replay that change no step of training."""
_NO_OTHER_SAVE: Mapping[str, Any] = {
    "checkpoint.every_minutes": None,
    "checkpoint.at_end": False,
    "checkpoint.save_best": False,
    "checkpoint.best_metric": "loss",
    "checkpoint.background": False,
    "checkpoint.stop_on_error": True,
}
_NO_EVALUATION: Mapping[str, Any] = {"evaluate.every": None, "evaluate.every_epochs": None}
"""Further settings that change no step unless the learning rate follows a metric."""


@dataclass(frozen=True, kw_only=True)
class ReplayRequest(RunRequest):
    """Arguments of the command line; None where an argument was left out."""

    step: int
    against: str | None
    dump: Path | None
    """Folder for what the step consists of."""
    save: Path | None
    """Run folder for the checkpoint of the step."""
    json: bool


def replay(request: ReplayRequest, nproc: int | None) -> int:
    """Replay, or launch the ranks that do; return the exit code: 0 if the step is equal, 1 if not.
    Raises `DrivetrainError`."""
    if request.save is not None and rank() == 0 and os.path.lexists(request.save):
        raise OutputError(f"--save {request.save} is there already; give the name of a new folder")
    earlier = find_earlier(place(request.run))
    folder = records_folder(earlier.folder)
    if request.against is not None:
        other = records_folder(find_earlier(place(request.against)).folder)
        return _show(request, compare_runs(folder, other, request.step), {})
    recorded = read_side(folder)
    target = recorded_at(recorded, request.step, f"--step {request.step}")
    config = read_config(folder)
    backend = request.requested.backend or str(config.get("backend") or "auto")
    if nproc is None:
        same = backend == target.start.get("backend")
        nproc = _ranks(target) if same else 1
    request = dataclasses.replace(
        request, nproc=nproc, requested=dataclasses.replace(request.requested, backend=backend)
    )
    return on_ranks(request, lambda run: _replay(request, run, recorded, target))


def _ranks(target: RecordedStep) -> int:
    world = target.start.get("world")
    size = world.get("size") if isinstance(world, dict) else None
    return size if type(size) is int and size > 0 else 1


def _checkpoint_at(source: Place, step: int) -> Place | None:
    """Return the complete checkpoint of a step in a run folder."""
    complete = list_checkpoints(checkpoints_of(source)).complete
    return next((found.folder for found in complete if found.step == step), None)


def _replay(request: ReplayRequest, run: LoadedRun, recorded: Side, target: RecordedStep) -> int:
    checkpoint = checkpoint_before(run.earlier.folder, run.earlier.source, target)
    since = 0 if checkpoint is None else step_of(checkpoint) or 0
    recorder = ReplayRecorder(target.step)
    settings = override(run.resolved.settings, _settings_then(target, run.resolved))
    left_out = dict(_LEFT_OUT) if settings.schedule.metric else {**_LEFT_OUT, **_NO_EVALUATION}
    if request.save is not None:
        left_out |= {**_NO_OTHER_SAVE, "checkpoint.every": target.step}

    with StepDump(target.step) as dump:
        fit(
            run.recipe if request.dump is None else dump.watched(run.recipe),
            override(settings, left_out),
            backend=run.driver.name,
            backend_options=run.resolved.backend_options,
            out=request.save,
            resume=checkpoint,
            observers=[recorder] if request.dump is None else [dump, recorder],
        )
    if target.step not in recorder.recorded.steps:
        raise DrivetrainError(
            f"the replay ended before it had logged step {target.step}: its log_every, steps or "
            f"its data differ from those of {recorded.name}, or it was stopped"
        )
    if request.dump is not None:
        dump.write(request.dump, rank(), recorder.recorded.steps[target.step])
    again = Side("replay", recorder.recorded, _config(recorded.config, run.resolved))
    comparison = compare_sides(recorded, again, target.step, since)
    compared = False
    if request.save is not None and comparison.tolerance.exact and rank() == 0:
        recorded_at = _checkpoint_at(run.earlier.source, target.step)
        again_at = _checkpoint_at(request.save, target.step)
        if recorded_at is not None and again_at is not None:
            compared = True
            found = differing_tensors(recorded_at, again_at)
            differences = [*comparison.differences, *found]
            comparison = dataclasses.replace(comparison, differences=differences)
    about = {
        "step": target.step,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "steps_again": target.step - since,
        "backend": run.driver.name,
        "checkpoint_compared": compared,
    }
    return _show(request, comparison, about)


def _settings_then(target: RecordedStep, resolved: Resolved) -> dict[str, Any]:
    """Return the settings of the start that made the step, where the command line gives no other:
    a resumed run may have had new ones."""
    then, known = target.start.get("settings"), flatten(resolved.settings)
    if not isinstance(then, Mapping):
        return {}
    kept = {key for key, source in resolved.sources.items() if source != COMMAND_LINE}
    return {key: value for key, value in then.items() if key in kept and key in known}


def _config(config: ShownConfig, resolved: Resolved) -> ShownConfig:
    """Return the configuration of the replay, as a run would have recorded it."""
    from ...run.run_folder_writer import configuration

    now = configuration(
        name="replay",
        recipe=Path(config.recipe) if config.recipe else None,
        command=(),
        given={},
        values=resolved.values,
        sources=resolved.sources,
        track=(),
    )
    return ShownConfig.of({**now, "backend": config.backend, "recipe": config.recipe})


def _show(request: ReplayRequest, comparison: Comparison, about: Mapping[str, Any]) -> int:
    if request.json:
        text = json.dumps({**about, **comparison.to_json()}, indent=1)
    else:
        lines = []
        if about:
            names = ("step", "backend", "steps_again", "checkpoint")
            lines.append(summary(*(about[name] for name in names)))
        text = "\n".join([*lines, *comparison.lines()])
    if rank() == 0:
        write_now(f"{printable(text)}\n", sys.stdout)
    return 1 if comparison.differences else 0

"""The parts of a replay: the record of a step, the checkpoint before it, and the replay's own
records."""

from __future__ import annotations

from typing import Any

from ..checkpoint import checkpoints_of, is_checkpoint, list_checkpoints
from ..checkpoint.catalog import step_of
from ..kernel.errors import CheckpointNotFound, SettingError
from ..kernel.events import Event, Request, StepEnded
from ..kernel.paths import Place
from ..trainer.digests import StepDigests
from .parted import Side
from .recorded_steps import RecordedStep, RecordedSteps
from .records import record_of

__all__ = ["ReplayRecorder", "checkpoint_before", "recorded_at", "summary"]


def recorded_at(side: Side, step: int, asked: str) -> RecordedStep:
    """Return the record of a step. `asked`: the argument that names the step, for the error. Raises
    `SettingError` if the step has no digests."""
    steps = side.recorded.steps
    if step in steps:
        return steps[step]
    if not steps:
        side.up_to(None)  # raises
    near = sorted(steps, key=lambda number: abs(number - step))[:2]
    raise SettingError(
        f"{asked}: {side.name} has recorded no digests of this step; the nearest that it "
        f"has are {' and '.join(map(str, sorted(near)))}. Steps are recorded each log_every"
    )


def checkpoint_before(run: Place, source: Place, target: RecordedStep) -> Place | None:
    """Return the newest complete checkpoint before a step; None to train from the start. `source`:
    a checkpoint, or the folder of all checkpoints of `run`. Raises `CheckpointNotFound` if the run
    itself did not train from the start."""
    step = target.step
    if is_checkpoint(source):
        found = step_of(source)
        if found is not None and found < step:
            return source
        raise CheckpointNotFound(f"{source} is not before step {step}; give the run folder")
    complete = list_checkpoints(checkpoints_of(source)).complete
    before = [found.folder for found in complete if found.step < step]
    if before:
        return before[-1]
    if target.start.get("first_step") == 0:
        return None
    have = ", ".join(str(found.step) for found in complete) or "none"
    raise CheckpointNotFound(
        f"no checkpoint before step {step} in {run} (complete checkpoints: {have}), "
        "and the run did not train from the start; keep more of the next run, with "
        "checkpoint.every and checkpoint.keep_last"
    )


class ReplayRecorder:
    """An observer that keeps what a run would have recorded, and stops it after a step."""

    def __init__(self, last: int) -> None:
        self.recorded, self._last = RecordedSteps(), last

    def __call__(self, event: Event) -> Request | None:
        if isinstance(event, StepEnded):
            return None
        self.recorded.add(record_of(event))
        stops = isinstance(event, StepDigests) and event.step >= self._last
        return Request.STOP if stops else None


def summary(step: int, backend: str, num_steps: int, checkpoint: Any) -> str:
    """Return a line on how a step was trained again, after how many steps, that one included.
    `checkpoint`: None for the start."""
    source = "the start" if checkpoint is None else checkpoint
    return f"step {step} again with {backend}, {num_steps} steps from {source}"

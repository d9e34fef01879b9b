"""Records of a Trainer's run, if `run_records` requests them: for `drivetrain report` and
`compare`, and for a replay.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...data.indexed import length_of
from ...kernel.batches import Position
from ...kernel.errors import SaveFailed
from ...kernel.events import Evaluated, Event, RunEnded, RunStarted, Saved
from ...kernel.loop import TrainLoop
from ...run.run_folder_writer import RunFolderWriter
from ...run.watch import Watcher
from ...trainer.announce import log_of
from ...trainer.digests import Digester
from ...trainer.step_clock import COMPUTE, EVALUATION, SAVING
from ..arguments.backend import settings
from ..enums import IntervalStrategy
from ..names import RECORDS
from .epochs import Epochs, RunLength
from .recorded_arguments import arguments_as_config
from .replay import Replay
from .time_parts import TimeParts

__all__ = ["RunRecords"]

_LOG = logging.getLogger(__name__)

_SPEEDS = ("runtime", "per_second", "preparation_time")


class RunRecords:
    """The records of one call of `train`, which rank 0 writes. All ranks call every method in the
    same order.

    A replay collects them instead. `folder`: of the checkpoints.
    """

    def __init__(self, trainer: Any, folder: Path, replay: Replay | None) -> None:
        self._trainer, self._replay = trainer, replay
        self._session = trainer.driver_session.session
        self._writer: RunFolderWriter | None = None
        if replay is None and self._session.world.rank == 0:
            self._writer = _writer(trainer.args, folder / RECORDS)
        self._watcher = Watcher([] if self._writer is None else [self._writer.sink], "samples")
        self._folder = folder
        self._digester: Digester | None = None
        self._length: RunLength | None = None

    def __call__(self, event: Event) -> None:
        """Record an event."""
        (self._watcher if self._replay is None else self._replay.recorder)(event)

    # --- the run ------------------------------------------------------------------------------

    def prepare(self, shows: object) -> None:
        """Prepare the digests. `shows`: shows the engine's updates, if it can."""
        session = self._trainer.driver_session
        self._digester = Digester(
            "weights",
            session.driver.capabilities(session.plan()),
            self._session,
            shows,
            self._is_logged,
            lambda position, num_samples: "",
        )

    @property
    def digester(self) -> Digester:
        """The digests of this rank, once the driver has wrapped the model."""
        assert self._digester is not None
        return self._digester

    def start(self, loop: TrainLoop, epochs: Epochs, length: RunLength, times: TimeParts) -> None:
        """Record the start. The first step follows."""
        self._length, trainer = length, self._trainer
        self._samples_of_epoch = epochs.batches_per_epoch * epochs.global_batch
        self.digester.restart()
        times.clock.take()  # the watcher has timed what came before
        num_samples = length_of(trainer.train_dataset)
        own = dataclasses.replace(
            settings(trainer.args, trainer.model),
            steps=length.max_steps,
            log_every=max(1, int(trainer.state.logging_steps or 1)),
        )
        self(
            RunStarted(
                backend=trainer.driver_session.driver.name,
                world=self._session.world,
                settings=own,
                total_steps=length.max_steps,
                steps_per_epoch=length.updates_per_epoch,
                num_samples=None if num_samples is None else int(num_samples),
                num_parameters=loop.engine.num_parameters,
                first_step=loop.progress.step,
                out=self._folder,
                flops_per_item=None,
            )
        )

    def _is_logged(self, step: int) -> bool:
        """Return whether the arguments have this step logged; callbacks may have others logged,
        whose samples and gradients have no digests."""
        args, state = self._trainer.args, self._trainer.state
        if self._replay is not None and step == self._replay.target.step:
            return True
        if args.logging_strategy == IntervalStrategy.EPOCH:
            return self._length is not None and step % self._length.updates_per_epoch == 0
        if args.logging_strategy == IntervalStrategy.STEPS and step % state.logging_steps == 0:
            return True
        return bool(args.logging_first_step) and step == 1

    def after_step(self, loop: TrainLoop, loss: Any) -> None:
        """Note the loss of a step. In a replay, request the log of the step that is replayed."""
        self.digester.add(loss)
        if self._replay is not None and loop.progress.step == self._replay.target.step:
            self._trainer.control.should_log = True

    def log(
        self, loop: TrainLoop, times: TimeParts, grad_norm: Any, learning_rate: float
    ) -> Mapping[str, float]:
        """Record the steps since the last log; return the seconds of each part of the time. Raises
        `SystemExit` at the end of a replay."""
        with times.clock.within(COMPUTE):  # for which it waits
            digests = self.digester.begin(loop)
            loop.resolve_pending_outcome()
            logged = log_of(loop, self._length_at, times.clock)
            found = digests()
        if grad_norm is not None:
            logged = dataclasses.replace(logged, grad_norm=float(grad_norm))
        if loop.progress.items:
            self._watcher.item_name = "items"
        else:  # the batches have no labels to count
            speed = logged.samples_per_second
            logged = dataclasses.replace(logged, items=logged.samples, items_per_second=speed)
        self(dataclasses.replace(logged, learning_rate=learning_rate))
        if found is not None:
            self(found)
        if self._replay is not None and logged.step == self._replay.target.step:
            self._replay.end(self._trainer)
        return logged.parts

    def _length_at(self, position: Position) -> float:
        return self._samples_of_epoch

    def evaluated(self, metrics: Mapping[str, Any], times: TimeParts) -> None:
        """Record the metrics of an evaluation, except speeds."""
        found = {
            name.removeprefix("eval_"): float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and name != "epoch" and not name.endswith(_SPEEDS)
        }
        seconds = self._left_out(times, EVALUATION)
        self(Evaluated(self._trainer.state.global_step, "eval", found, seconds))

    def saved(self, folder: Path, error: SaveFailed | None, times: TimeParts) -> None:
        """Record a checkpoint, or why it was not written."""
        step, seconds = self._trainer.state.global_step, self._left_out(times, SAVING)
        self(Saved(step, folder, seconds, "" if error is None else str(error)))

    def _left_out(self, times: TimeParts, part: str) -> float:
        """Return the seconds of the last evaluation or save, which count for no step."""
        seconds = times.last_seconds[part]
        self._trainer._running().window.leave_out(seconds)
        return seconds

    def end(self, step: int, reason: str, seconds: float) -> None:
        """Record the end, or raise `DrivetrainError` in a replay: it ends before."""
        if self._replay is not None:
            raise self._replay.not_reached(step)
        self(RunEnded(step, reason, seconds))

    def fail(self, error: BaseException) -> None:
        """Record the error that ended the run in its report."""
        if self._writer is not None:
            self._writer.fail(f"{type(error).__name__}: {error}")


def _writer(args: Any, folder: Path) -> RunFolderWriter:
    def command(started: Mapping[str, Any], reason: str) -> str:
        return "" if reason == "finished" else "trainer.train(resume_from_checkpoint=True)"

    config = arguments_as_config(args, folder.parent.name)
    writer = RunFolderWriter(folder, config, command)
    writer.files.report = _LOG.warning
    return writer

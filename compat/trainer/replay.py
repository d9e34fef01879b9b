"""A recorded step that is trained again, if `replay_step` requests it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ...checkpoint.catalog import step_of
from ...kernel.errors import CheckpointNotFound, DrivetrainError, SettingError, printable
from ...run.output import write_now
from ...run.parted import Side, compare_sides, read_side
from ...run.recorded_steps import RecordedStep
from ...run.replayed import ReplayRecorder, checkpoint_before, recorded_at, summary
from ..errors import ArgumentError
from ..names import RECORDS
from .hf_terms import in_hf_terms
from .recorded_arguments import arguments_as_config

__all__ = ["Replay"]


@dataclass(frozen=True)
class Replay:
    """The replay of one step. It begins with the checkpoint before that step, and ends the process
    once the step is compared with its record."""

    recorded: Side
    target: RecordedStep
    checkpoint: str | None
    """None to train from the start."""
    recorder: ReplayRecorder

    @classmethod
    def of(cls, args: Any, folder: Path) -> Replay | None:
        """Return the replay that the arguments request. `folder`: of the run's checkpoints. Raises
        `ArgumentError` if the step is not recorded, or no checkpoint lies before it."""
        if (step := getattr(args, "replay_step", None)) is None:
            return None
        asked = f"replay_step={step}"
        try:
            recorded = read_side(folder / RECORDS)
            target = recorded_at(recorded, step, asked)
            checkpoint = checkpoint_before(folder, folder, target)
        except (CheckpointNotFound, SettingError) as error:
            text = in_hf_terms(str(error))
            raise ArgumentError(text if asked in text else f"{asked}: {text}") from error
        path = None if checkpoint is None else str(checkpoint)
        return cls(recorded, target, path, ReplayRecorder(step))

    @property
    def since(self) -> int:
        """The step from which training begins."""
        return 0 if self.checkpoint is None else step_of(Path(self.checkpoint)) or 0

    def end(self, trainer: Any) -> NoReturn:
        """Print the comparison on rank 0, and raise `SystemExit`: 0 if the step is equal, else
        1."""
        config = arguments_as_config(trainer.args, "replay")
        session = trainer.driver_session
        config |= {"backend": session.driver.name, "world_size": session.world.size}
        again = Side("replay", self.recorder.recorded, type(self.recorded.config).of(config))
        comparison = compare_sides(self.recorded, again, self.target.step, self.since)
        if session.world.rank == 0:
            step, num_steps = self.target.step, self.target.step - self.since
            how = summary(step, session.driver.name, num_steps, self.checkpoint)
            lines = [how, *map(in_hf_terms, comparison.lines())]
            write_now("".join(f"{printable(line)}\n" for line in lines), sys.stdout)
        raise SystemExit(1 if comparison.differences else 0)

    def not_reached(self, step: int) -> DrivetrainError:
        """Return the error for a training that has ended before the step."""
        return DrivetrainError(
            f"replay_step={self.target.step}: training ended at step {step}, before it: max_steps, "
            f"the data or a callback differ from those of {self.recorded.name}"
        )

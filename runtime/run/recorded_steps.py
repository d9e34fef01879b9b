"""The steps that a run has recorded: their figures, and their digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..kernel.errors import CheckpointNotFound, OutputError
from ..trainer.tensor_figures import TensorFigures, unpacked
from .record_file import Record, RecordFile
from .run_folder import METRICS
from .watch import DIGESTS

__all__ = ["RecordedStep", "RecordedSteps", "read_steps"]


@dataclass(frozen=True)
class RecordedStep:
    """A step that was logged, with digests."""

    step: int
    logged: Record
    digests: Record
    start: Record
    """The record of the start of the run that made the step."""
    weights: Mapping[str, TensorFigures]
    gradients: Mapping[str, TensorFigures]
    """Empty where none are recorded."""

    @property
    def losses(self) -> dict[int, float | None]:
        """The loss of each step since the log before; None where it was not finite."""
        losses: Sequence[float | None] = self.digests["losses"]
        return dict(zip(range(self.step - len(losses) + 1, self.step + 1), losses, strict=True))


@dataclass
class RecordedSteps:
    """Steps by number. A step that was trained again, after a resume, replaces the earlier one."""

    steps: dict[int, RecordedStep] = field(default_factory=dict)
    logged: set[int] = field(default_factory=set)
    """Steps that were logged, with digests or without."""
    first: Record | None = None
    """The record of the first start."""
    _start: Record | None = None
    _logged: Record | None = None
    _names: Sequence[str] = ()
    _gradient_names: Sequence[str] = ()

    def add(self, record: Record) -> None:
        """Add a record that came after all others."""
        event = record["event"]
        if event == "run_started":
            self._start, self._names, self._gradient_names = record, (), ()
            self.first = self.first or record
            self._go_back(record["first_step"])
        elif event == "rolled_back":
            self._go_back(record["step"])
        elif event == "logged":
            self._logged = record
            self.logged.add(record["step"])
        elif event == DIGESTS:
            self._add_digests(record)

    def _go_back(self, step: int) -> None:
        self.steps = {number: found for number, found in self.steps.items() if number <= step}
        self.logged = {number for number in self.logged if number <= step}

    def _add_digests(self, record: Record) -> None:
        logged, start = self._logged, self._start
        if logged is None or start is None or logged["step"] != record["step"]:
            return
        self._names = record["names"] or self._names
        self._gradient_names = record.get("gradient_names") or self._gradient_names
        try:
            weights = _by_name(self._names, record["weights"])
            gradients = _by_name(self._gradient_names, record.get("gradients") or "")
        except ValueError:  # a damaged record
            return
        self.steps[record["step"]] = RecordedStep(
            record["step"], logged, record, start, weights, gradients
        )


def _by_name(names: Sequence[str], text: str) -> dict[str, TensorFigures]:
    return dict(zip(names, unpacked(text), strict=True)) if text else {}


def read_steps(folder: Path) -> RecordedSteps:
    """Read the steps of a run folder. Raises `CheckpointNotFound` for a folder that no run writes
    to, and `OutputError` for records that cannot be read."""
    path = folder / METRICS
    if not path.is_file():
        raise CheckpointNotFound(
            f"{folder} is no run folder: there is no {METRICS} in it; give the folder that `--out` "
            "named"
        )
    found = RecordedSteps()
    try:
        for records in RecordFile(path).new():
            for record in records:
                found.add(record)
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error}") from error
    return found

"""Reports that arguments request, on parameters, memory and values that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ...kernel.batches import Group, Groups
from ...kernel.events import Event, StepSkipped
from ...kernel.loop import TrainLoop
from ...trainer.shown_updates import shared
from ..arguments.reports import DIAGNOSTICS
from .memory_parts import MemoryParts
from .nonfinite import FirstNonFinite
from .parameter_statistics import ParameterStatistics
from .run_records import RunRecords

__all__ = ["Diagnostics"]


class Diagnostics:
    """The reports of one call of `train`, created before the driver wraps the model. Called by all
    ranks in the same order."""

    @classmethod
    def of(cls, trainer: Any, trial: Any) -> Diagnostics | None:
        """Return the reports of a call of `train`; None if its arguments request none."""
        asked = trainer._replay is not None or any(_asked(trainer, name) for name in DIAGNOSTICS)
        return cls(trainer, trial) if asked else None

    def __init__(self, trainer: Any, trial: Any) -> None:
        self._trainer, replay = trainer, trainer._replay
        self.records: RunRecords | None = None
        if replay is not None or _asked(trainer, "run_records"):
            self.records = RunRecords(trainer, Path(trainer._get_output_dir(trial)), replay)
        self.memory = MemoryParts(trainer) if _asked(trainer, "memory_parts") else None
        self.statistics: ParameterStatistics | None = None
        self.nonfinite: FirstNonFinite | None = None
        self._has_updated = self._has_stepped = False

    def begin(self) -> None:
        """Note that the driver has wrapped the model. Raises `ArgumentRefused` if it cannot report
        what is requested."""
        shows = shared(self._trainer.driver_session.engine)
        if every := _asked(self._trainer, "stats_steps"):
            self.statistics = ParameterStatistics(self._trainer, every, shows)
        if self.records is not None:
            self.records.prepare(shows)
        if _asked(self._trainer, "find_nonfinite"):
            self.nonfinite = FirstNonFinite(self._trainer)

    def watched(
        self, data: Groups, mark: Callable[[str], object]
    ) -> tuple[Groups, Callable[[str], object]]:
        """Return the data and `mark` of the loop, whose microbatches and forwards are noted."""
        if (memory := self.memory) is not None:
            data, mark = memory.noting_batch(data), memory.marking(mark)
        if (nonfinite := self.nonfinite) is not None:
            data = nonfinite.watch(data)
            mark = nonfinite.marking(mark)
        if (records := self.records) is not None:
            data = records.digester.watched(data, self._steps_done)
        return data, mark

    def _steps_done(self) -> int:
        return int(self._trainer._running().progress.step)

    @contextmanager
    def watching(self, loop: TrainLoop) -> Iterator[None]:
        """Surround the steps: memory is counted, and activations are measured."""
        with ExitStack() as stack:
            if self.statistics is not None:
                stack.enter_context(self.statistics.watching(loop))
            if self.memory is not None:
                stack.enter_context(self.memory)
            yield

    def add(self, loss: Tensor) -> None:
        """Note the loss of a microbatch."""
        if self.nonfinite is not None:
            self.nonfinite.add(loss)

    def before_update(self, loop: TrainLoop) -> None:
        """Look at the next update."""
        if self.memory is not None and not self._has_updated:
            self._has_updated = True
            self.memory.before_first_update()
        if self.statistics is not None:
            self.statistics.before_update(loop.progress.step + 1)
        if self.records is not None:
            self.records.digester.before_update(loop.progress.step + 1)

    def after_step(self, loop: TrainLoop, group: Group, num_items: Any, loss: Tensor) -> None:
        """Note the end of a step. `num_items`: as `training_step` received it."""
        if self.nonfinite is not None:
            accumulation = self._trainer.current_gradient_accumulation_steps
            self.nonfinite.after_step(group, num_items, accumulation)
        if self.statistics is not None:
            self.statistics.after_update(loop.progress.step)
        if self.memory is not None and not self._has_stepped:
            self._has_stepped = True
            if counted := self.memory.report(loop.progress.step):
                self._record(counted)
        if self.records is not None:
            self.records.after_step(loop, loss)

    def log(self) -> None:
        """Pass the statistics of the last step to callbacks, if it was measured."""
        if self.statistics is not None:
            found = self.statistics.log(self._trainer.state.global_step)
            if found is not None:
                self._record(found)

    def skipped(self, event: StepSkipped, group: Group) -> None:
        """Report on a step that was not applied."""
        self._record(event)
        if self.nonfinite is not None and (found := self.nonfinite.report(event, group)):
            self._record(found)

    def _record(self, event: Event) -> None:
        if self.records is not None:
            self.records(event)

    def largest_parts(self) -> str:
        """Return a sentence on the largest parts of memory, for an error; empty if none is
        known."""
        return "" if self.memory is None else self.memory.largest_parts()


def _asked(trainer: Any, name: str) -> Any:
    """Return an argument of a Trainer, whose arguments may be transformers' own."""
    return getattr(trainer.args, name, None)

"""When the averages of a run's weights are updated, and how far they move."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..checkpoint import CheckpointReader
from ..checkpoint.averages import WithoutAverages, has_averages
from ..kernel.contract import Engine
from ..kernel.errors import CapabilityRefused, SettingError
from ..kernel.loop import TrainLoop
from ..kernel.optional import AveragesWeights
from .settings import Settings

__all__ = ["AveragesWeights", "WeightAverages", "refuse_no_average"]


def refuse_no_average(settings: Settings) -> None:
    """Raises `SettingError` if averages shall be evaluated but none are kept."""
    if settings.evaluate.weights == "average" and settings.average.decay is None:
        raise SettingError(
            "evaluate.weights is 'average', and average.decay is none, so that there is none; set "
            "average.decay, to 0.999 for example"
        )


class WeightAverages:
    """The averages of an engine, or none, by the settings. All ranks call every method."""

    def __init__(self, settings: Settings, engine: Engine, driver: str) -> None:
        self.settings, self._done = settings, 0
        self._engine: AveragesWeights | None = None
        if settings.average.decay is not None:
            if not isinstance(engine, AveragesWeights):
                raise CapabilityRefused(
                    f"average.decay={settings.average.decay}",
                    driver,
                    "it keeps no averages of weights; set average.decay=none, or take another "
                    "driver, and average saved checkpoints by `drivetrain checkpoint average`",
                )
            self._engine = engine

    def catch_up(self, loop: TrainLoop) -> None:
        """Move the averages after an update, at the latest before the next update, once it is known
        whether the update was applied. An update that was not applied does not move them."""
        if self._engine is None:
            return
        loop.resolve_pending_outcome()
        applied, average = loop.progress.applied, self.settings.average
        if applied == self._done:
            return
        self._done = applied
        if applied >= average.start and applied % average.every == 0:
            assert average.decay is not None
            self._engine.average(1.0 - average.decay)

    def evaluated(self) -> AbstractContextManager[Any]:
        """Evaluate the block with the averages, if the settings ask for them."""
        if self._engine is None or self.settings.evaluate.weights != "average":
            return nullcontext()
        return self._engine.averaged()

    def taken_from(self, reader: CheckpointReader) -> CheckpointReader:
        """Return the reader of a checkpoint, without averages if the run keeps none."""
        if self._engine is None and has_averages(reader):
            return WithoutAverages(reader.folder)
        return reader

    def restored(self, loop: TrainLoop, reader: CheckpointReader) -> tuple[str, ...]:
        """Note that the loop resumed from a checkpoint. Return notes on averages that the
        checkpoint lacks, or that the run does not load."""
        self._done = loop.progress.applied
        if isinstance(reader, WithoutAverages):
            return ("the checkpoint's averages of weights are left out (average.decay is none)",)
        begun = self._done >= max(self.settings.average.start, 1)
        if self._engine is None or not begun or has_averages(reader):
            return ()
        return ("the checkpoint holds no averages of weights: they start from the weights",)

"""Measures each parameter in some steps, if `stats_steps` requests it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ...kernel.errors import CapabilityRefused
from ...trainer.settings import StatsSettings
from ...trainer.statistics import Statistics
from ..arguments.backend import settings
from ..callbacks.progress import StatisticsLog
from ..errors import ArgumentRefused
from .hf_terms import in_hf_terms

__all__ = ["ParameterStatistics"]


class ParameterStatistics(Statistics):
    """The statistics of each step that is a multiple of `every`. Called by all ranks in the same
    order."""

    def __init__(self, trainer: Any, every: int) -> None:
        """Raises `ArgumentRefused` if the driver shows no updates."""
        self._trainer, session = trainer, trainer.driver_session
        own = replace(
            settings(trainer.args, trainer.model), stats=StatsSettings(every=every), log_every=1
        )
        try:
            super().__init__(own, session.engine, session.session, session.driver.name)
        except CapabilityRefused as error:
            asked = re.sub(r"stats\.every(=\d+)?", f"stats_steps={every}", error.asked)
            remedy = in_hf_terms(str(error).partition(": ")[2])
            raise ArgumentRefused(asked, error.driver, remedy, error.capability) from error

    def log(self, step: int) -> None:
        """Pass the statistics of this step to all callbacks, if it was measured.

        They are a log of their own, which is not in `state.log_history`: each checkpoint has the
        whole history in its `trainer_state.json`, and eight numbers for each parameter would make
        that file larger than the model of a long run.
        """
        if (found := self.take(step)) is None:
            return
        logs = StatisticsLog(
            (f"stats/{kind}/{name}", value)
            for name, figures in found.parameters.items()
            for kind, value in figures.items()
            if value is not None
        )
        trainer = self._trainer
        if trainer.state.epoch is not None:
            logs["epoch"] = trainer.state.epoch
        trainer.control = trainer.callback_handler.on_log(
            trainer.args, trainer.state, trainer.control, logs
        )

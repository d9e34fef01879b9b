"""Measures each parameter in some steps, if `stats_steps` requests it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from ...kernel.errors import CapabilityRefused, SettingError
from ...kernel.loop import TrainLoop
from ...trainer.settings import StatsSettings
from ...trainer.statistics import Statistics, Stats
from ..arguments.backend import settings
from ..callbacks.progress import StatisticsLog
from ..errors import ArgumentError, ArgumentRefused
from .hf_terms import in_hf_terms

__all__ = ["ParameterStatistics"]


class ParameterStatistics(Statistics):
    """The statistics of each step that is a multiple of `every`. Called by all ranks in the same
    order."""

    def __init__(self, trainer: Any, every: int, shows: object) -> None:
        """`shows`: the engine that shows its updates. Raises `ArgumentRefused` if it shows none."""
        self._trainer, session = trainer, trainer.driver_session
        patterns = tuple(getattr(trainer.args, "stats_activations", None) or ())
        own = replace(
            settings(trainer.args, trainer.model), stats=StatsSettings(every, patterns), log_every=1
        )
        try:
            super().__init__(own, shows, session.session, session.driver.name)
        except SettingError as error:
            raise ArgumentError(in_hf_terms(str(error))) from error
        except CapabilityRefused as error:
            asked = re.sub(r"stats\.every(=\d+)?", f"stats_steps={every}", error.asked)
            asked = in_hf_terms(asked)
            remedy = in_hf_terms(str(error).partition(": ")[2])
            raise ArgumentRefused(asked, error.driver, remedy, error.capability) from error

    @contextmanager
    def watching(self, loop: TrainLoop) -> Iterator[None]:
        """See `Statistics.watching`. Raises `ArgumentError` for a pattern that matches no
        module."""
        with ExitStack() as stack:
            try:
                stack.enter_context(super().watching(loop))
            except SettingError as error:
                raise ArgumentError(in_hf_terms(str(error))) from error
            yield

    def log(self, step: int) -> Stats | None:
        """Pass the statistics of this step to all callbacks, if it was measured, and return them.

        They are a log of their own, which is not in `state.log_history`: each checkpoint has the
        whole history in its `trainer_state.json`, and eight numbers for each parameter would make
        that file larger than the model of a long run.
        """
        if (found := self.take(step)) is None:
            return None
        logs = StatisticsLog(
            (f"stats/{kind}/{name}", value)
            for name, figures in {**found.parameters, **found.activations}.items()
            for kind, value in figures.items()
            if value is not None
        )
        trainer = self._trainer
        if trainer.state.epoch is not None:
            logs["epoch"] = trainer.state.epoch
        trainer.control = trainer.callback_handler.on_log(
            trainer.args, trainer.state, trainer.control, logs
        )
        return found

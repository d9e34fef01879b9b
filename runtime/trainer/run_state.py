"""The state of a run in a checkpoint, besides tensors, and how a run restores it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoint import CheckpointReader, Manifest, own_random_state
from ..data.open_dataset import Source
from ..kernel.batches import ENDLESS
from ..kernel.contract import Session
from ..kernel.loop import TrainLoop
from ..kernel.paths import Place
from .after_update import AfterUpdate
from .evaluations import Evaluations
from .left_out import LeftOut
from .loop_state import loop_from_json, loop_to_json
from .module_state import ModuleState
from .nonfinite import NonFiniteSearch
from .observer_states import ObserverStates
from .optimizer_record import OptimizerRecord
from .planned_steps import Planned
from .saves import stored_metrics
from .settings import Settings
from .spikes import Spikes
from .start_checks import json_types
from .statistics import Statistics
from .turn_losses import TurnLosses
from .weight_averages import WeightAverages

__all__ = ["RunState"]


@dataclass
class RunState:
    """The parts of one rank's run that have a state. Both methods are called by all ranks."""

    backend: str
    session: Session
    settings: Settings
    source: Source
    planned: Planned
    optimizer: OptimizerRecord
    evaluations: Evaluations
    spikes: Spikes
    nonfinite: NonFiniteSearch
    turn_losses: TurnLosses
    averages: WeightAverages
    after_update: AfterUpdate
    observers: ObserverStates
    statistics: Statistics | None
    left_out: LeftOut
    modules: ModuleState
    number_next_update: Callable[[TrainLoop], None]
    loss: float = math.nan
    """The last loss that was logged."""

    def to_save(self, loop: TrainLoop) -> dict[str, Any]:
        """Return the arguments of `CheckpointStore.save` for the present step. Raises `RecipeError`
        if the optimizer's state cannot be saved."""
        self.optimizer.refuse_unsaved()
        self.averages.catch_up(loop)
        # weights that the optimizer does not train may change after an update
        link_frozen = self.settings.checkpoint.link_frozen and not self.after_update.changes
        return {
            "step": loop.progress.step,
            "engine": loop.engine,
            "session": self.session,
            "state": {
                **loop_to_json(loop),
                "begun": self.source.begun(loop.progress.position),
                "planned": self.planned.to_json(),
                **self.measured(loop),
                "optimizer": self.optimizer.noted,
                **({"loss": self.loss} if math.isfinite(self.loss) else {}),
                **({"spikes": self.spikes.to_json()} if self.spikes.watches else {}),
                **({"turns": self.turn_losses.to_json()} if self.turn_losses.keeps else {}),
            },
            "settings": json_types(self.settings),
            "driver": self.backend,
            "frozen": self.optimizer.not_learning if link_frozen else (),
        }

    def measured(self, loop: TrainLoop) -> dict[str, Any]:
        """Return the entries of the state that an evaluation of the present step changes."""
        observers = self.observers.to_json()
        return {
            "metrics": self.evaluations.to_json(loop.progress.step),
            **({"observers": observers} if observers else {}),
        }

    def restore(self, loop: TrainLoop, path: Place) -> tuple[Manifest, tuple[str, ...]]:
        """Restore a checkpoint. Return its manifest, and notes on the state that it lacks. Raises
        `CheckpointError` before any tensor is changed."""
        reader = CheckpointReader(path)
        where = str(path)
        state = reader.manifest.loop_state(where)
        stored_metrics(state, where)  # may raise; nothing is changed yet
        keep = self.settings.resume.optimizer == "keep"
        reader, notes = self.optimizer.taken_from(reader, keep)
        reader = self.averages.taken_from(reader)
        notes += self._restore_data(loop, state, where)
        self.spikes.restore(state.get("spikes"), where)
        self.turn_losses.restore(state.get("turns"), where)
        self.observers.restore(state.get("observers"), where)
        progress, window = loop_from_json(state, self.session, where)
        with own_random_state(reader, self.session, self.backend) as unknown:
            loop.restore(reader, progress, window)
        self.after_update.restored(loop)
        loss = state.get("loss")
        self.loss = loss if isinstance(loss, float) else math.nan
        notes += self.averages.restored(loop, reader)
        notes += self.modules.notes(reader, self.backend)
        if unknown:
            if len(unknown) == len(self.session.rng_state()):
                feeder, step = self.session.world.feeder_index, loop.progress.step
                self.session.seed(self.settings.seed + 1 + feeder + step)
            names = ", ".join(unknown)
            notes += (f"no random state for this rank in the checkpoint: seeded again ({names})",)
        return reader.manifest, notes

    def _restore_data(
        self, loop: TrainLoop, state: Mapping[str, Any], where: str
    ) -> tuple[str, ...]:
        """Restore the order of the begun epoch and the number of steps; returns notes of what
        changed."""
        notes = self.planned.resume(state, where)
        loop.total_steps = ENDLESS if self.planned.total is None else self.planned.total
        return notes

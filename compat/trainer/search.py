"""Hyper-parameter search: a library selects values, and the Trainer trains with them.

Optuna runs in this process; with its SQLite storage, several processes can share a study. Ray Tune
and Weights & Biases have their own workers or server. With several ranks, rank 0 calls the library
and broadcasts the values to the others, also when a trial is pruned and when the search is over.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from ..arguments.backend import describe
from ..enums import HPSearchBackend
from ..evaluation.outputs import BestRun
from ..integrations.search import default_compute_objective, installed_backend, set_argument
from ..integrations.search_libraries import LIBRARIES
from ..theirs import theirs
from .saving import CheckpointMixin

__all__ = ["SearchMixin"]

_LOG = logging.getLogger(__name__)


class SearchMixin(CheckpointMixin):
    """The Trainer's side of a search."""

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], float | list[float]] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: str | HPSearchBackend | None = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun] | None:
        """Train `n_trials` times with arguments from `hp_space`, and return the best run; with
        several directions, the Pareto-optimal runs. Ranks other than 0 get None.

        `hp_space(trial)` returns argument -> value; `compute_objective(metrics)` returns one value
        per direction; `kwargs` are passed to the library. Raises RuntimeError without `model_init`,
        or if the library is not installed.
        """
        chosen = installed_backend(backend)
        library = LIBRARIES[chosen]
        if self.model_init is None:
            raise RuntimeError(
                "a search trains a new model for each trial, so it needs Trainer(model_init=...), "
                "a function that makes the model"
            )
        self.hp_search_backend = chosen
        self.hp_space = hp_space or theirs("trainer_utils", f"default_hp_space_{chosen.value}")
        self.hp_name = hp_name
        self.compute_objective = compute_objective or default_compute_objective
        try:
            best: BestRun | list[BestRun] | None = library.run(self, n_trials, direction, **kwargs)
            return best
        finally:
            self.hp_search_backend = None

    def _hp_search_setup(self, trial: Any) -> None:
        """Set the arguments to the trial's values, and open a new session, which the values may
        change."""
        self._trial = trial
        if self.hp_search_backend is None or trial is None:
            return
        by_optuna = self.hp_search_backend == HPSearchBackend.OPTUNA
        values = self.hp_space(trial) if by_optuna else dict(trial)
        values.pop("wandb", None)
        for name, value in values.items():
            set_argument(self.args, name, value)
        _LOG.info("trial: %s", values)
        self._train_batch_size = self.args.train_batch_size
        describe(self.args)
        self.driver_session.close()
        self.create_accelerator_and_postprocess()

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Report the trial's objective to the library. Raises the library's exception for a pruned
        trial."""
        if self.hp_search_backend is None or trial is None:
            return
        self.objective = self.compute_objective(dict(metrics))
        LIBRARIES[self.hp_search_backend].report(self, trial, step, dict(metrics))

    def _tune_save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save into Ray Tune's folder of a trial."""
        folder = os.path.join(checkpoint_dir, f"checkpoint-{self.state.global_step}")
        before, self.args.output_dir = self.args.output_dir, checkpoint_dir
        try:
            self._save_checkpoint(self.model, None)
        finally:
            self.args.output_dir = before
        assert os.path.isdir(folder) or not self.args.should_save, folder

"""Hyper-parameter search: a library chooses values, the Trainer trains with them.

Optuna runs in this process, and with its SQLite storage in several that share one study. Ray Tune
and Weights & Biases bring workers or a server of their own. Under several ranks, rank 0 asks the
library and tells the others, also when a trial is to be pruned and when the search is over.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from ..arguments.backend import describe
from ..checkpoints.saving import CheckpointMixin
from ..enums import HPSearchBackend
from ..evaluation.outputs import BestRun
from .search_libraries import LIBRARIES

__all__ = ["SearchMixin", "default_compute_objective"]

_LOG = logging.getLogger(__name__)

_NO_METRICS = re.compile(r"epoch|eval_loss|.*_(runtime|per_second|time)|.*_mem_.*")
"""Keys that say how the run went, not how good the model is."""


def default_compute_objective(metrics: Mapping[str, float]) -> float:
    """The sum of all metrics but the loss, or the loss where there are no others.

    Times, speeds and memory are not counted, nor the epoch.
    """
    rest = [value for name, value in metrics.items() if not _NO_METRICS.fullmatch(name)]
    return sum(rest) if rest else metrics["eval_loss"]


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
        """Train `n_trials` times with arguments from `hp_space`, and give the best run; with
        several directions, the runs that no other beats. Ranks other than 0 get None.

        `hp_space(trial)` gives argument -> value; `compute_objective(metrics)` one value a
        direction; `kwargs` go to the library. Raises RuntimeError without `model_init`, or when
        the library is not installed.
        """
        chosen = _installed() if backend is None else HPSearchBackend(backend)
        library = LIBRARIES[chosen]
        if find_spec(library.module) is None:
            raise RuntimeError(f"{chosen.value} is not installed: pip install {library.package}")
        if self.model_init is None:
            raise RuntimeError(
                "a search trains anew for each trial, so it needs Trainer(model_init=...), a "
                "function that makes the model"
            )
        self.hp_search_backend = chosen
        self.hp_space = hp_space or library.default_space
        self.hp_name = hp_name
        self.compute_objective = compute_objective or default_compute_objective
        try:
            best: BestRun | list[BestRun] | None = library.run(self, n_trials, direction, **kwargs)
            return best
        finally:
            self.hp_search_backend = None

    def _hp_search_setup(self, trial: Any) -> None:
        """Take the trial's values into the arguments; a fresh session, as they may change it."""
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
        """Tell the library how the trial is going. Raises its exception for a pruned one."""
        if self.hp_search_backend is None or trial is None:
            return
        self.objective = self.compute_objective(dict(metrics))
        LIBRARIES[self.hp_search_backend].report(self, trial, step, dict(metrics))

    def _tune_save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save into the folder that Ray Tune keeps of a trial."""
        folder = os.path.join(checkpoint_dir, f"checkpoint-{self.state.global_step}")
        before, self.args.output_dir = self.args.output_dir, checkpoint_dir
        try:
            self._save_checkpoint(self.model, None)
        finally:
            self.args.output_dir = before
        assert os.path.isdir(folder) or not self.args.should_save, folder


def set_argument(args: Any, name: str, value: Any) -> None:
    """Set an argument to a trial's value, as the type that it has. Unknown ones are warned of."""
    if not hasattr(args, name):
        _LOG.warning("the trial sets %s=%r, and there is no such argument", name, value)
        return
    old = getattr(args, name)
    setattr(args, name, value if old is None else type(old)(value))


def _installed() -> HPSearchBackend:
    for name, library in LIBRARIES.items():
        if find_spec(library.module) is not None:
            return name
    packages = ", ".join(library.package for library in LIBRARIES.values())
    raise RuntimeError(f"no library for searches is installed; pip install one of {packages}")

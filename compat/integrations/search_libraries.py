"""The libraries that search hyper-parameters, behind one protocol."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from ..enums import HPSearchBackend
from ..errors import ArgumentError
from ..evaluation.outputs import BestRun
from ..parts import TrainerParts

__all__ = ["LIBRARIES", "Library"]

_LOG = logging.getLogger(__name__)


class Library(Protocol):
    """A library for searches."""

    module: str
    package: str

    def run(self, trainer: TrainerParts, n_trials: int, direction: Any, **options: Any) -> Any:
        """Run the whole search; return the best run or runs."""
        ...

    def report(
        self, trainer: TrainerParts, trial: Any, step: int, metrics: dict[str, float]
    ) -> None:
        """Report `trainer.objective` at a step of a trial, on every rank. May raise to end the
        trial."""
        ...

    def run_id(self, trial: Any) -> Any:
        """Return the identifier in the name of the trial's folder."""
        ...


def train_once(
    trainer: TrainerParts, trial: Any, checkpoint: str | None = None
) -> dict[str, float]:
    """Run one trial, whose objective is `trainer.objective`. Evaluate if training did not."""
    trainer.objective = None
    trainer.train(resume_from_checkpoint=checkpoint, trial=trial)
    metrics: dict[str, float] = {}
    if trainer.objective is None:
        metrics = trainer.evaluate()
        trainer.objective = trainer.compute_objective(metrics)
    trainer.accelerator.free_memory()
    return metrics


# --- Optuna ---------------------------------------------------------------------------------


class Optuna:
    """https://optuna.org, in this process."""

    module = "optuna"
    package = "optuna"

    def run(
        self,
        trainer: TrainerParts,
        n_trials: int,
        direction: str | list[str],
        timeout: float | None = None,
        n_jobs: int = 1,
        gc_after_trial: bool = False,
        catch: Any = (),
        **study_options: Any,
    ) -> BestRun | list[BestRun] | None:
        import optuna

        if n_jobs != 1:
            raise ArgumentError(
                f"n_jobs is {n_jobs}, and a Trainer trains one model at a time. Run this script "
                "several times at once instead, with storage='sqlite:///trials.db', study_name "
                "and load_if_exists=True: the processes share the study"
            )
        if trainer.args.process_index > 0:
            self._follow(trainer, catch)
            return None
        several = isinstance(direction, list)
        study_options["directions" if several else "direction"] = direction
        study = optuna.create_study(**study_options)
        study.optimize(
            lambda trial: self._lead(trainer, trial),
            n_trials=n_trials,
            timeout=timeout,
            gc_after_trial=gc_after_trial,
            catch=catch,
        )
        _broadcast(trainer, None)  # no further trials
        best: Any = study.best_trials if several else [study.best_trial]
        runs = [BestRun(str(t.number), t.values if several else t.value, t.params) for t in best]
        return runs if several else runs[0]

    def report(
        self, trainer: TrainerParts, trial: Any, step: int, metrics: dict[str, float]
    ) -> None:
        import optuna

        prune = False
        if hasattr(trial, "study") and len(trial.study.directions) == 1:
            trial.report(trainer.objective, step)
            prune = bool(trial.should_prune())  # a numpy scalar, which cannot be broadcast
        if _broadcast(trainer, prune):
            trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
            raise optuna.TrialPruned()

    def run_id(self, trial: Any) -> Any:
        return trial.number

    def _lead(self, trainer: TrainerParts, trial: Any) -> Any:
        """Run a trial on rank 0, which first draws and broadcasts its values."""
        if trainer.args.world_size > 1:
            trainer.hp_space(trial)
            _broadcast(trainer, {"params": trial.params, "number": trial.number})
        train_once(trainer, trial)
        return trainer.objective

    def _follow(self, trainer: TrainerParts, catch: Any) -> None:
        """Run all trials that rank 0 broadcasts, on another rank."""
        import optuna

        expected = (optuna.TrialPruned, *(catch if isinstance(catch, tuple) else (catch,)))
        while (trial := _broadcast(trainer, None)) is not None:
            try:
                train_once(trainer, optuna.trial.FixedTrial(trial["params"], trial["number"]))
            except expected:
                _LOG.debug("trial %s ended early", trial["number"])


def _broadcast(trainer: TrainerParts, value: Any) -> Any:
    """Return the value of rank 0 on every rank."""
    if trainer.args.world_size == 1:
        return value
    return trainer.driver_session.session.exchange(value)[0]


# --- Ray Tune -------------------------------------------------------------------------------


class Ray:
    """https://docs.ray.io: trials in workers of their own, each with a copy of the Trainer."""

    module = "ray"
    package = "'ray[tune]'"

    def run(self, trainer: TrainerParts, n_trials: int, direction: Any, **options: Any) -> BestRun:
        from ray import tune

        if not isinstance(direction, str):
            raise ArgumentError(f"direction is {direction!r}; Ray Tune is given one objective here")
        if "scheduler" in options and trainer.args.eval_strategy == "no":
            raise RuntimeError(
                f"the scheduler {type(options['scheduler']).__name__} goes by evaluations, and "
                "eval_strategy is 'no'; set it to steps or epoch"
            )
        gpus = 1 if trainer.args.n_gpu > 0 else 0
        options.setdefault("resources_per_trial", {"cpu": 1, "gpu": gpus})
        trainer.model = trainer.model_wrapped = None  # each trial makes its own
        analysis = tune.run(
            tune.with_parameters(self._trial, local_trainer=trainer),
            config=trainer.hp_space(None),
            num_samples=n_trials,
            **options,
        )
        mode, scope = direction[:3], os.environ.get("RAY_SCOPE", "last")
        best = analysis.get_best_trial(metric="objective", mode=mode, scope=scope)
        if best is None:
            raise RuntimeError("no trial of Ray Tune reported an objective; its log says why")
        return BestRun(best.trial_id, best.last_result["objective"], best.config, analysis)

    def report(
        self, trainer: TrainerParts, trial: Any, step: int, metrics: dict[str, float]
    ) -> None:
        self._report(trainer, metrics, trainer.control.should_save)

    def run_id(self, trial: Any) -> Any:
        from ray import tune

        return tune.get_context().get_trial_id()

    def _trial(self, trial: dict[str, Any], local_trainer: TrainerParts) -> None:
        """Run a trial in a worker."""
        from ray import tune

        if (stored := tune.get_checkpoint()) is None:
            metrics = train_once(local_trainer, trial)
        else:
            with stored.as_directory() as folder:
                (newest,) = Path(folder).glob("checkpoint-*")
                metrics = train_once(local_trainer, trial, str(newest))
        if metrics:  # nothing was reported while training
            self._report(local_trainer, {**metrics, "done": True}, save=True)

    def _report(self, trainer: TrainerParts, metrics: Mapping[str, Any], save: bool) -> None:
        from ray import tune

        with TemporaryDirectory() as folder:
            checkpoint = None
            if save:
                trainer._tune_save_checkpoint(checkpoint_dir=folder)
                checkpoint = tune.Checkpoint.from_directory(folder)
            tune.report({**metrics, "objective": trainer.objective}, checkpoint=checkpoint)


# --- Weights & Biases -----------------------------------------------------------------------


class Wandb:
    """Sweeps of Weights & Biases, whose server chooses the values: there is no offline mode."""

    module = "wandb"
    package = "wandb"

    def run(
        self,
        trainer: TrainerParts,
        n_trials: int,
        direction: str | list[str],
        sweep_id: str | None = None,
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        metric: str = "eval/loss",
        **options: Any,
    ) -> BestRun:
        import wandb

        if options:
            raise TypeError(f"a sweep of W&B has no options {', '.join(options)}")
        if not isinstance(direction, str) or trainer.args.world_size > 1:
            raise ArgumentError("a sweep of W&B has one objective and one process")
        sweep = {**trainer.hp_space(None), "metric": {"name": metric, "goal": direction}}
        if name:
            sweep["name"] = name
        best: list[BestRun] = []
        better: Any = operator.lt if direction == "minimize" else operator.gt

        def trial() -> None:
            run: Any = wandb.run or wandb.init()
            values = dict(run.config)
            run.config.update({"assignments": {}, "metric": metric})
            train_once(trainer, values)
            if not best or better(trainer.objective, best[0].objective):
                best[:] = [BestRun(run.id, trainer.objective, values)]

        trainer.args.report_to = ["wandb"]
        sweep_id = sweep_id or wandb.sweep(sweep, project=project, entity=entity)
        wandb.agent(sweep_id, function=trial, count=n_trials, project=project, entity=entity)
        if not best:
            raise RuntimeError(f"sweep {sweep_id} of W&B ended without a single finished trial")
        return best[0]._replace(run_summary=sweep_id)

    def report(
        self, trainer: TrainerParts, trial: Any, step: int, metrics: dict[str, float]
    ) -> None:
        """Do nothing: the tracker's callback reports to the server already."""

    def run_id(self, trial: Any) -> Any:
        import wandb

        run: Any = wandb.run
        return run.id


LIBRARIES: dict[HPSearchBackend, Library] = {
    HPSearchBackend.OPTUNA: Optuna(),
    HPSearchBackend.RAY: Ray(),
    HPSearchBackend.WANDB: Wandb(),
}
"""The libraries in order of preference."""

"""A job of two ranks: searches with the real Trainer. Rank 0 alone draws the values of
each search.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import torch
from side_by_side import ARGUMENTS, Classifier, losses, samples

from drivetrain.compat import Trainer, TrainerCallback, TrainingArguments
from drivetrain.conformance.bench import Bench

RATES = (1e-2, 1e-4, 2e-2)
"""Learning rates. The second is hopeless, and pruned."""
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
}


class Noting(TrainerCallback):  # type: ignore[misc]
    """Records the arguments of each trial, as its callbacks see them."""

    def __init__(self) -> None:
        self.trials: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        facts = args.hf_deepspeed_config
        weights = next(kwargs["model"].parameters())
        self.trials.append(
            {
                "rate": args.learning_rate,
                "batch": args.per_device_train_batch_size,
                "name": state.trial_name,
                "params": state.trial_params,
                "searching": state.is_hyper_param_search,
                "configured": facts and facts.get_value("train_batch_size"),
                "dtype": str(weights.dtype),
            }
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trials[-1]["losses"] = [log["loss"] for log in state.log_history if "loss" in log]
        self.trials[-1]["evaluated"] = sum("eval_loss" in log for log in state.log_history)


def search(folder: Path, space: Any, n_trials: int, **more: Any) -> dict[str, Any]:
    """Run a search, and return its result on this rank."""
    given = {**ARGUMENTS, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 1}
    options = {key: more.pop(key) for key in ("pruner", "sampler") if key in more}
    noting = Noting()

    def model(trial: Any = None) -> Classifier:
        torch.manual_seed(1)
        return Classifier()

    trainer = Trainer(
        None,
        TrainingArguments(str(folder), **given, **more),
        train_dataset=samples(24),
        eval_dataset=samples(8),
        model_init=model,
        callbacks=[noting],
    )
    best: Any = trainer.hyperparameter_search(
        space, n_trials=n_trials, hp_name=lambda trial: f"trial {trial.number}", **options
    )
    trainer.end()
    return {
        "best": best and [best.run_id, best.objective, best.hyperparameters],
        "trials": noting.trials,
        "last": losses(trainer),
    }


def rates(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_categorical("learning_rate", list(RATES))}


def batches(trial: Any) -> dict[str, Any]:
    sizes = trial.suggest_categorical("per_device_train_batch_size", [2, 4])
    return {"per_device_train_batch_size": sizes}


def everything(bench: Bench, *, out: str) -> dict[str, Any]:
    """A job: run the searches, and return their results on this rank, by driver."""
    folder = Path(out)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    grid = optuna.samplers.GridSampler({"learning_rate": list(RATES)}, seed=0)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=2)
    found = {"ddp": search(folder / "ddp", rates, 3, sampler=grid, pruner=pruner)}
    grid = optuna.samplers.GridSampler({"per_device_train_batch_size": [2, 4]}, seed=0)
    deepspeed = {"deepspeed": DEEPSPEED, "bf16": True}
    found["deepspeed"] = search(folder / "deepspeed", batches, 2, sampler=grid, **deepspeed)
    return found

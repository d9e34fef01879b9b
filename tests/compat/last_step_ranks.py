"""A job of two processes: the last evaluation of a Trainer, or its last event, fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from side_by_side import accuracy, arguments, classifier, samples

from drivetrain import compat
from drivetrain.conformance.bench import Bench


class Order(compat.TrainerCallback):
    """Records the order of events, and raises after the last step at one of them."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.seen: list[str] = []

    def _note(self, state: Any, name: str) -> None:
        self.seen.append(name)
        if name == self.fails and state.global_step == state.max_steps:
            raise ConnectionError("the server is away")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(state, "evaluate")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.fails == "predict":
            self._note(state, "predict")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(state, "save")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(state, "end")


def trainer(folder: Path, fails: str = "", **changes: Any) -> compat.Trainer:
    """Return a Trainer of four steps that evaluates and saves after the second and the last one.
    `fails`: an event, or `metrics` for `compute_metrics`."""

    def metrics(prediction: Any) -> dict[str, Any]:
        if fails == "metrics" and made.state.global_step == made.state.max_steps:
            raise KeyError("f1")
        return {**accuracy(prediction), "steady": 1.0}

    asked = {
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        **changes,
    }
    made = compat.Trainer(
        classifier(),
        arguments(compat, folder, **asked),
        train_dataset=samples(24),
        eval_dataset=samples(11),
        compute_metrics=metrics,
        callbacks=[Order(fails)],
    )
    return made


def order(of: compat.Trainer) -> list[str]:
    return next(each.seen for each in of.callback_handler.callbacks if isinstance(each, Order))


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("checkpoint-"))


def failing(bench: Bench, folder: str, fails: str, ranks: list[int], **changes: Any) -> Any:
    """Train, and fail on these ranks after the last step. Return the error, the checkpoints and
    the order of events."""
    mine = int(os.environ["RANK"]) in ranks
    made = trainer(Path(folder), fails if mine else "", backend=bench.backend, **changes)
    error = ""
    try:
        made.train()
    except Exception as raised:
        error = type(raised).__name__
    return [error, checkpoints(Path(folder)), order(made)]

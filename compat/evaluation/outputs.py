"""The results of training, evaluation, prediction and search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["BestRun", "EvalLoopOutput", "EvalPrediction", "PredictionOutput", "TrainOutput"]

Arrays = Any
"""A numpy array whose first dimension counts samples, or a tuple, list or dict of them."""


class EvalPrediction:
    """The input of `compute_metrics`: arrays over the whole data set, or, under
    `batch_eval_metrics`, the tensors of one batch.

    Unpacks and indexes as a tuple: (predictions, label_ids), then inputs and losses if they were
    asked for by `include_for_metrics`.
    """

    def __init__(
        self, predictions: Arrays, label_ids: Arrays, inputs: Arrays = None, losses: Arrays = None
    ) -> None:
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses
        extras = (item for item in (inputs, losses) if item is not None)
        self.elements: tuple[Arrays, ...] = (predictions, label_ids, *extras)

    def __iter__(self) -> Iterator[Arrays]:
        return iter(self.elements)

    def __getitem__(self, index: int) -> Arrays:
        """Raises IndexError outside 0 .. number of elements - 1."""
        if not 0 <= index < len(self.elements):
            raise IndexError(f"element {index} of a prediction that has {len(self.elements)}")
        return self.elements[index]


class EvalLoopOutput(NamedTuple):
    """The result of `evaluation_loop`. `num_samples` does not count padding."""

    predictions: Arrays
    label_ids: Arrays | None
    metrics: dict[str, float] | None
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """The result of `predict`; `label_ids` is None when the data set has no labels."""

    predictions: Arrays
    label_ids: Arrays | None
    metrics: dict[str, float] | None


class TrainOutput(NamedTuple):
    """The result of `train`. `training_loss`: the mean over the updates of this call."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class BestRun(NamedTuple):
    """The best trial of a hyper-parameter search. `run_summary` is the searching library's own."""

    run_id: str
    objective: float | list[float]
    hyperparameters: dict[str, Any]
    run_summary: Any | None = None

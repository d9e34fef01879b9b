"""Callbacks that control a run: its default flow, and early stopping."""

from __future__ import annotations

import logging
import math
from typing import Any

from ..enums import IntervalStrategy, SaveStrategy
from ..profile import profile_of
from .base import TrainerCallback
from .state import ExportableState, TrainerControl, TrainerState

__all__ = ["DEFAULT_CALLBACKS", "DefaultFlowCallback", "EarlyStoppingCallback"]

_log = logging.getLogger(__name__)


class DefaultFlowCallback(TrainerCallback):
    """Logs, evaluates and saves when the arguments say so, and stops at the last step."""

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        step, last = state.global_step, state.global_step >= state.max_steps
        if args.logging_strategy == IntervalStrategy.STEPS and step % state.logging_steps == 0:
            control.should_log = True
        if args.logging_first_step and step == 1:
            control.should_log = True
        if args.eval_strategy == IntervalStrategy.STEPS and args.eval_delay <= step:
            control.should_evaluate |= step % state.eval_steps == 0
            control.should_evaluate |= last and profile_of(args).evaluates_last_step
        if args.save_strategy == SaveStrategy.STEPS:
            control.should_save |= last or (state.save_steps > 0 and step % state.save_steps == 0)
        if last:
            control.should_training_stop = True
        return control

    def on_epoch_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if args.logging_strategy == IntervalStrategy.EPOCH:
            control.should_log = True
        if args.eval_strategy == IntervalStrategy.EPOCH and args.eval_delay <= (state.epoch or 0):
            control.should_evaluate = True
        if args.save_strategy == SaveStrategy.EPOCH:
            control.should_save = True
        return control


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stops after `early_stopping_patience` evaluations in a row without an improvement of
    `metric_for_best_model` by more than `early_stopping_threshold` over the best so far.

    Raises ValueError at the start of training when nothing is evaluated or no metric is named.
    """

    def __init__(
        self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0
    ) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0

    def check_metric_value(
        self, args: Any, state: TrainerState, control: TrainerControl, metric_value: float
    ) -> None:
        """Count one more evaluation without improvement, or reset the count."""
        gain = math.inf
        if state.best_metric is not None:
            gain = metric_value - state.best_metric
            gain = gain if args.greater_is_better else -gain
        improved = gain > max(self.early_stopping_threshold or 0.0, 0.0)  # of the distance
        self.early_stopping_patience_counter = (
            0 if improved else self.early_stopping_patience_counter + 1
        )

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.metric_for_best_model is None:
            raise ValueError("early stopping watches a metric: set metric_for_best_model")
        if args.eval_strategy == IntervalStrategy.NO:
            raise ValueError("early stopping needs evaluations: eval_strategy is 'no'")
        if not args.load_best_model_at_end:
            _log.warning(
                "early stopping without load_best_model_at_end: "
                "training will end with the last weights, not with the best"
            )

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        name = args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        metrics = metrics or {}
        value = metrics.get(name)
        if value is None:
            _log.warning("early stopping: there is no %s in %s", name, sorted(metrics))
            return
        self.check_metric_value(args, state, control, value)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        """Return the two arguments and the count."""
        names = ("early_stopping_patience", "early_stopping_threshold")
        count = "early_stopping_patience_counter"
        return {
            "args": {name: getattr(self, name) for name in names},
            "attributes": {count: getattr(self, count)},
        }


DEFAULT_CALLBACKS = [DefaultFlowCallback]
"""The first callbacks of every Trainer."""

"""Evaluations while a run trains: which metric is watched, and whether it is the best so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...kernel.errors import ran_out
from ..enums import SaveStrategy
from ..names import PREFIX_CHECKPOINT_DIR
from ..profile import profile_of

__all__ = ["EvaluationInTrainingMixin"]


class EvaluationInTrainingMixin:
    """What the training loop asks of evaluation."""

    def _evaluate(
        self: Any, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate, tell a search, and step a schedule that follows a metric."""
        try:
            metrics: dict[str, float] = self.evaluate(ignore_keys=ignore_keys_for_eval)
        except RuntimeError as error:
            if not (self.args.auto_find_batch_size and ran_out(error)):
                raise
            raise RuntimeError(
                # in words by which nobody takes it for one of training's
                "evaluation met an out-of-memory error, and auto_find_batch_size changes the batch "
                f"size of training only: reduce per_device_eval_batch_size "
                f"({self.args.per_device_eval_batch_size})"
            ) from error
        self._report_to_hp_search(trial, self.state.global_step, metrics)
        if hasattr(self.lr_scheduler, "patience") and not skip_scheduler:
            self.lr_scheduler.step(_watched(self.args, metrics))
        return metrics

    def _determine_best_metric(self: Any, metrics: dict[str, float], trial: Any) -> bool:
        """Whether `metric_for_best_model` is better than ever before; if so it is noted."""
        args, state = self.args, self.state
        if args.metric_for_best_model is None:
            return False
        value, best = _watched(args, metrics), state.best_metric
        worst = -math.inf if args.greater_is_better else math.inf
        state.best_metric = worst if best is None else best
        if not (value > state.best_metric if args.greater_is_better else value < state.best_metric):
            return False
        state.best_metric = value
        if args.save_strategy != SaveStrategy.NO:
            state.best_global_step = state.global_step
            if profile_of(args).names_best_early:
                folder = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
                state.best_model_checkpoint = f"{self._get_output_dir(trial=trial)}/{folder}"
        return True


def _watched(args: Any, metrics: Mapping[str, float]) -> float:
    """The value of `metric_for_best_model`. Raises KeyError that lists what there is."""
    name = args.metric_for_best_model
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        raise KeyError(
            f"metric_for_best_model is {args.metric_for_best_model!r}, and {name!r} is not among "
            f"the metrics of the evaluation: {', '.join(metrics)}. Return it from compute_metrics, "
            "or set metric_for_best_model to one of these"
        )
    return metrics[name]

"""Between steps: logs, evaluations and checkpoints as the flags ask, and which metric is best."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ...kernel.errors import SaveFailed, ran_out
from ..enums import SaveStrategy
from ..evaluation.loop import EvaluationMixin
from ..integrations.search import SearchMixin
from ..names import PREFIX_CHECKPOINT_DIR
from ..optim.schedules import follows_a_metric
from ..profile import profile_of

__all__ = ["BetweenStepsMixin"]

_LOG = logging.getLogger(__name__)


class BetweenStepsMixin(EvaluationMixin, SearchMixin):
    """HF Trainer's methods that run between the steps of the training loop."""

    def _maybe_log_save_evaluate(
        self,
        tr_loss: Tensor,
        grad_norm: Any,
        model: nn.Module,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        """Log, evaluate and save where the control flags ask for it, in this order."""
        state = self.state
        if self.control.should_log and state.global_step > self._globalstep_last_logged:
            self._log_steps(tr_loss, grad_norm, learning_rate, start_time)
        if self.control.should_evaluate:
            metrics = self._evaluate(trial, ignore_keys_for_eval)
            improved = self._determine_best_metric(metrics=metrics, trial=trial)
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = improved
        if self.control.should_save and self._is_saved(model, trial):
            self.control = self.callback_handler.on_save(self.args, state, self.control)

    def _is_saved(self, model: nn.Module, trial: Any) -> bool:
        """Save a checkpoint. One that cannot be written is told; training goes on with the last."""
        best = self.state.best_model_checkpoint
        try:
            self._save_checkpoint(model, trial)
        except SaveFailed as error:
            self.state.best_model_checkpoint = best
            _LOG.error("%s. Training goes on", error)
            return False
        return True

    def _log_steps(
        self, tr_loss: Tensor, grad_norm: Any, learning_rate: float | None, start_time: float
    ) -> None:
        state, profile = self.state, profile_of(self.args)
        total = self._mean_over_ranks(tr_loss)
        loss = total / (state.global_step - self._globalstep_last_logged)
        logs: dict[str, float] = {"loss": round(loss, 4) if profile.rounds_loss else loss}
        clips = self.args.max_grad_norm or profile.logs_unclipped_grad_norm
        if grad_norm is not None and clips:
            logs["grad_norm"] = float(grad_norm)
        if learning_rate is None or not profile.logs_rate_of_update:
            learning_rate = self._get_learning_rate()
        logs["learning_rate"] = learning_rate
        self._total_loss_scalar += total
        self._globalstep_last_logged = state.global_step
        if self._training is not None:
            self._training.start_window()
        else:
            tr_loss -= tr_loss  # which a loop of a subclass's own goes on to add to
        self.store_flos()
        self.log(logs, start_time)

    def _mean_over_ranks(self, losses: Tensor) -> float:
        """The losses since the last log, added up over steps; averaged over ranks."""
        session = self.driver_session.session
        total = session.reduce(losses.detach().to(session.world.device))
        return float(total) / session.world.num_feeders

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate, tell a search, and step a schedule that follows a metric."""
        try:
            metrics: dict[str, float] = self.evaluate(ignore_keys=ignore_keys_for_eval)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            args, step = self.args, self.state.global_step
            to_do = f"reduce per_device_eval_batch_size ({args.per_device_eval_batch_size})"
            found = f"rank {args.process_index} ran out of memory in the evaluation after step"
            self.driver_session.give_up(f"{found} {step}: {to_do}", retry=False)
            if not args.auto_find_batch_size:
                raise
            raise RuntimeError(
                # in words by which nobody takes it for one of training's
                "evaluation met an out-of-memory error, and auto_find_batch_size changes the batch "
                f"size of training only: {to_do}"
            ) from error
        self._report_to_hp_search(trial, self.state.global_step, metrics)
        schedule: Any = self.lr_scheduler
        if follows_a_metric(schedule) and not skip_scheduler:
            schedule.step(_watched(self.args, metrics))
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """True if `metric_for_best_model` is better than ever before; if so it is noted."""
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

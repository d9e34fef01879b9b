"""Actions between steps: logs, evaluations and checkpoints by the flags, and the best metric."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ...kernel.errors import ran_out
from ...trainer.step_clock import COMPUTE, EVALUATION, SAVING
from ..enums import SaveStrategy
from ..names import PREFIX_CHECKPOINT_DIR
from ..optim.schedules import follows_a_metric
from ..profile import profile_of
from .keeping import KeepingMixin

__all__ = ["BetweenStepsMixin"]

_LOG = logging.getLogger(__name__)


class BetweenStepsMixin(KeepingMixin):
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
        """Log, evaluate and save, in this order, if the control flags request it."""
        state = self.state
        if self.control.should_log and state.global_step > self._globalstep_last_logged:
            with self._timed(COMPUTE):  # for which a log waits
                self._log_steps(tr_loss, grad_norm, learning_rate, start_time)
        if self._diagnostics is not None:
            self._diagnostics.log()
        if self.control.should_evaluate:
            with self._keeping_last_step(model, trial):
                with self._timed(EVALUATION):
                    metrics = self._evaluate(trial, ignore_keys_for_eval)
                if (records := self._records) is not None and self._times is not None:
                    records.evaluated(metrics, self._times)
                improved = self._determine_best_metric(metrics=metrics, trial=trial)
                if self.args.save_strategy == SaveStrategy.BEST:
                    self.control.should_save = improved
        if not self.control.should_save or self._replay is not None:
            return
        with self._timed(SAVING):
            saved = self._try_to_save(model, trial)
        self._record_save(trial, None if saved else self._save_error)
        if saved:
            self.control = self.callback_handler.on_save(self.args, state, self.control)

    def _log_steps(
        self, tr_loss: Tensor, grad_norm: Any, learning_rate: float | None, start_time: float
    ) -> None:
        if self._training is not None:
            self._training.audit()
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
        self.store_flos()
        if self._training is None:
            tr_loss -= tr_loss  # a subclass's own loop continues to add to it
        else:
            if (times := self._times) is not None:
                parts: Mapping[str, float]
                if (records := self._records) is None:
                    parts = times.clock.take()
                else:
                    parts = records.log(self._training, times, grad_norm, learning_rate)
                logs |= times.logs(self._training.progress, parts)
            self._training.start_window()
        with self._open_to_writes("log"):
            self.log(logs, start_time)

    def _mean_over_ranks(self, losses: Tensor) -> float:
        """Return the sum of the losses since the last log, averaged over ranks."""
        session = self.driver_session.session
        total = session.reduce(losses.detach().to(session.world.device))
        return float(total) / session.world.num_feeders

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate, report to a search, and step a schedule that follows a metric."""
        try:
            with self._open_to_writes("evaluate", "evaluation_loop"):
                metrics: dict[str, float] = self.evaluate(ignore_keys=ignore_keys_for_eval)
        except RuntimeError as error:
            if not ran_out(error):
                raise
            args, step = self.args, self.state.global_step
            to_do = f"reduce per_device_eval_batch_size ({args.per_device_eval_batch_size})"
            found = f"rank {args.process_index} ran out of memory in the evaluation after step"
            self.driver_session.abort_ranks(f"{found} {step}: {to_do}", retry=False)
            if not args.auto_find_batch_size:
                raise
            raise RuntimeError(
                # worded so that it is not taken for an error of training
                "evaluation met an out-of-memory error, and auto_find_batch_size changes the batch "
                f"size of training only: {to_do}"
            ) from error
        self._report_to_hp_search(trial, self.state.global_step, metrics)
        schedule: Any = self.lr_scheduler
        if follows_a_metric(schedule) and not skip_scheduler:
            schedule.step(_watched(self.args, metrics))
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Return whether `metric_for_best_model` is better than ever before; if so, record it."""
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
    """Return the value of `metric_for_best_model`. Raises KeyError that lists the metrics."""
    name = args.metric_for_best_model
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        raise KeyError(
            f"metric_for_best_model is {args.metric_for_best_model!r}, and {name!r} is not among "
            f"the metrics of the evaluation: {', '.join(metrics)}. Return it from compute_metrics, "
            "or set metric_for_best_model to one of these"
        )
    return metrics[name]

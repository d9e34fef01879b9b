"""The end of training: the summary, the best model and the last events."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from ..common.metrics import speed_metrics
from ..evaluation.outputs import TrainOutput
from .between_steps import BetweenStepsMixin

__all__ = ["FinalizingMixin"]


class FinalizingMixin(BetweenStepsMixin):
    """The part of `train` after the last step."""

    def _finalize_training(
        self, trial: Any, num_train_samples: float, start_time: float
    ) -> TrainOutput:
        """Log the summary, load the best model, and call the last events."""
        state = self.state
        self._total_loss_scalar += self._loss_since_last_log()
        steps = state.global_step - self._initial_global_step
        loss = self._total_loss_scalar / max(steps, 0.001)
        metrics = speed_metrics(
            "train",
            start_time,
            num_samples=num_train_samples * steps / max(state.max_steps, 1),
            num_steps=steps,
        )
        self.store_flos()
        metrics["total_flos"] = state.total_flos
        metrics["train_loss"] = loss
        self._memory_tracker.stop_and_update_metrics(metrics)
        try:
            with self._saving_after_failure(self.model_wrapped, trial, "the log of the end"):
                self.log(metrics)
            best = self.args.load_best_model_at_end and state.best_model_checkpoint is not None
            if best:
                self._load_best_model()
            self._keep_only_the_best(trial)
            keeping = self._saving_after_failure(self.model_wrapped, trial, "on_train_end")
            with nullcontext() if best else keeping:  # the best is saved, and now the model's
                self.control = self.callback_handler.on_train_end(self.args, state, self.control)
        finally:
            self._finish_current_push()
            self._deactivate_neftune(self.model)
            self._training = self._training_data = self._mode = None
            self.is_in_train = False
        return TrainOutput(state.global_step, loss, metrics)

    def _loss_since_last_log(self) -> float:
        training = self._training
        if training is None:  # a subclass runs its own loop
            return self._mean_over_ranks(getattr(self, "_tr_loss", torch.zeros(())))
        window = training.window
        grown = training.progress.step > window.first_step  # including steps before a resume
        return self._mean_over_ranks(torch.as_tensor(window.loss_sum)) if grown else 0.0

"""One batch of an evaluation: its loss, predictions and labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..common.loss import require_names
from ..evaluation.nested import nested_detach
from ..profile import profile_of
from .training_step import StepMixin

__all__ = ["PredictionStepMixin"]


class PredictionStepMixin(StepMixin):
    """`prediction_step` and the methods that it calls."""

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Return loss, logits and labels of one batch; each None if missing.

        Several outputs, or labels, are a tuple. Without labels there is no loss, except for models
        that can compute one from the other inputs (`can_return_loss`).
        """
        require_names(inputs, "prediction_step")
        names = self.label_names
        asked = inputs.get("return_loss")
        has_loss = (
            all(inputs.get(name) is not None for name in names)
            if names
            else bool(self.can_return_loss if asked is None else asked)
        )
        inputs = self._prepare_inputs(inputs)
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            default = ["past_key_values"] if config is not None else []
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", default)
        # read first: computing the loss may pop them
        labels = nested_detach(tuple(inputs.get(name) for name in names)) if has_loss else None
        with torch.no_grad():
            loss, outputs = self._loss_and_outputs(model, inputs, has_loss, prediction_loss_only)
        if prediction_loss_only:
            return loss, None, None
        if isinstance(outputs, Mapping):
            left_out = {*ignore_keys, *(["loss"] if has_loss else [])}
            outputs = tuple(value for name, value in outputs.items() if name not in left_out)
        elif has_loss and isinstance(outputs, list | tuple):
            outputs = outputs[1:]
        if type(outputs) in (list, tuple):
            outputs = type(outputs)(value for value in outputs if not _is_cache(value))
        return loss, _only(nested_detach(outputs)), None if labels is None else _only(labels)

    def _loss_and_outputs(
        self, model: nn.Module, inputs: Any, has_loss: bool, loss_only: bool
    ) -> tuple[Tensor | None, Any]:
        if not has_loss:
            with self.compute_loss_context_manager():
                return None, model(**inputs)
        counted: dict[str, Any] = {}
        if profile_of(self.args).counts_items_in_evaluation:
            counted["num_items_in_batch"] = self._get_num_items_in_batch([inputs], self.args.device)
        if loss_only and self.args.use_liger_kernel:
            inputs = {**inputs, "skip_logits": True}
        with self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True, **counted)
        return loss.detach().mean() if loss.dim() else loss.detach(), outputs


def _is_cache(value: Any) -> bool:
    """True for a model's cache for generation, which has no item per sample to gather."""
    return any(base.__name__.endswith("Cache") for base in type(value).__mro__)


def _only(values: Any) -> Any:
    """Return several values unchanged, and a single value without its container."""
    return values[0] if isinstance(values, list | tuple) and len(values) == 1 else values

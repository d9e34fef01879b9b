"""DeepSpeed's own loss scaler, used where the weights are float16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def scaler_tensors(scaler: Any) -> dict[str, Tensor]:
    """Its state under the names of `model_state.scale_tensors`; empty when it never changes."""
    if not scaler.dynamic:
        return {}
    good_steps = scaler.cur_iter - scaler.last_overflow_iter - 1
    return {
        "loss_scale": torch.tensor(float(scaler.cur_scale)),
        "loss_scale_good_steps": torch.tensor(good_steps, dtype=torch.int32),
        "loss_scale_hysteresis": torch.tensor(scaler.cur_hysteresis, dtype=torch.int32),
    }


def set_scaler(scaler: Any, state: Mapping[str, Tensor]) -> None:
    """Undo what changed since that `scaler_tensors`."""
    scaler.cur_scale = float(state["loss_scale"])
    scaler.last_overflow_iter = scaler.cur_iter - int(state["loss_scale_good_steps"]) - 1
    scaler.cur_hysteresis = int(state["loss_scale_hysteresis"])

"""Adafactor at a given learning rate, for when transformers is not installed.

https://arxiv.org/abs/1804.04235, without its own step size and without scaling by the parameter:
what `optim="adafactor"` asks of transformers' version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Adafactor"]


class Adafactor(Optimizer):
    """Divides gradients by their root mean square, kept by row and column for matrices.

    `decay_rate`: at update t the mean forgets by 1 - t ** decay_rate. `clip_threshold`: the
    largest root mean square of an update. `eps`: added to squared gradients. Weights of less than
    32 bits are updated in float32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        eps: float = 1e-30,
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad.float()  # type: ignore[union-attr]
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        keep = 1.0 - state["step"] ** group["decay_rate"]
        squared = gradient.square() + group["eps"]
        if gradient.ndim >= 2:
            rows = _averaged(state, "exp_avg_sq_row", squared.mean(-1), keep)
            columns = _averaged(state, "exp_avg_sq_col", squared.mean(-2), keep)
            scale = (rows / rows.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
            update = gradient * (scale * columns.rsqrt().unsqueeze(-2))
        else:
            update = gradient * _averaged(state, "exp_avg_sq", squared, keep).rsqrt()
        size = update.norm() / update.numel() ** 0.5
        update /= (size / group["clip_threshold"]).clamp(min=1.0)
        weights = parameter.float()
        weights = weights * (1.0 - group["weight_decay"] * group["lr"]) - group["lr"] * update
        parameter.copy_(weights)


def _averaged(state: dict[str, Any], name: str, value: Tensor, keep: float) -> Tensor:
    """The running mean of that name, after taking in a value."""
    mean: Tensor = state.setdefault(name, torch.zeros_like(value))
    return mean.mul_(keep).add_(value, alpha=1.0 - keep)

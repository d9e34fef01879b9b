"""Optimizers that step inside the backward pass, one per parameter, so that gradients do not
accumulate.

The trainer gets a placeholder for them that does nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["LayerWiseDummyOptimizer", "LayerWiseDummyScheduler"]


class LayerWiseDummyOptimizer(Optimizer):
    """A placeholder for one optimizer per parameter, each of which steps once its gradient is
    computed.

    `optimizer_dict`: the optimizer of each parameter. Each gradient is dropped after use.
    """

    def __init__(
        self,
        optimizer_dict: Mapping[nn.Parameter, Optimizer] | None = None,
        lr: float = 1e-3,
        **kwargs: Any,
    ) -> None:
        self.optimizer_dict = dict(optimizer_dict or {})
        super().__init__([torch.zeros(1, 1)], {"lr": lr})
        for parameter in self.optimizer_dict:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._step_one)  # type: ignore[no-untyped-call]

    def _step_one(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            optimizer = self.optimizer_dict[parameter]  # type: ignore[index]
            optimizer.step()
            optimizer.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: the steps are done in backward."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: no gradient is left."""


class LayerWiseDummyScheduler(LRScheduler):
    """Steps a scheduler for each optimizer after the update of its parameter.

    `make` builds the scheduler of one optimizer. The trainer's own calls do nothing.
    """

    def __init__(
        self,
        optimizer: LayerWiseDummyOptimizer,
        make: Callable[[Optimizer], LRScheduler],
    ) -> None:
        self.schedulers = {
            parameter: make(inner) for parameter, inner in optimizer.optimizer_dict.items()
        }
        for parameter in self.schedulers:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._step_one)  # type: ignore[no-untyped-call]
        self.optimizer = optimizer
        self.base_lrs = [optimizer.defaults["lr"]]

    def _step_one(self, parameter: torch.Tensor) -> None:
        self.schedulers[parameter].step()  # type: ignore[index]

    def step(self, epoch: int | None = None) -> None:
        """Do nothing: the schedulers step in backward."""

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """Return the present rates, one per parameter."""
        lists = [inner.get_last_lr() for inner in self.schedulers.values()]
        return [lr for rates in lists for lr in rates] or list(self.base_lrs)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all schedulers, in the order of the parameters."""
        return {"schedulers": [inner.state_dict() for inner in self.schedulers.values()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        inner = self.schedulers.values()
        for scheduler, state in zip(inner, state_dict["schedulers"], strict=True):
            scheduler.load_state_dict(state)

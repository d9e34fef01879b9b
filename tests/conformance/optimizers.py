"""Optimizers that torch does not have, each with something that a driver can get wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Counting", "Estimating", "Noisy", "OtherDtypes", "optimizer_class"]


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups, as schedule-free optimizers do, and in an attribute that its
    `state_dict` adds, as Lookahead does. Moves by the mean of the last two gradients, and keeps
    them in a list.
    """

    turns = 0

    def __init__(self, params: Iterable[Any], lr: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0, "started": False})

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "turns": self.turns}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.turns = state_dict["turns"]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        self.turns = (self.turns + 1) % 3
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += (1.0 + self.turns) / group["k"]
            group["started"] = True
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"] / group["weight_sum"])

    def _update(self, parameter: Tensor, rate: float) -> None:
        state = self.state[parameter]
        state.setdefault("note", None)
        last: list[Tensor] = state.get("last", [])
        state["last"] = [*last[-1:], parameter.grad.clone()]  # type: ignore[union-attr]
        state["moved"] = (state.get("moved", (0, 0.0))[0] + 1, rate)
        parameter.sub_(sum(state["last"]) / len(state["last"]), alpha=rate)


class Estimating(torch.optim.Optimizer):
    """Estimates its rate from all parameters together, as Prodigy and D-Adaptation do."""

    def __init__(self, params: Iterable[Any], lr: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "d": 0.1, "largest": torch.zeros(())})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = float(torch.stack([grad.norm() for grad in grads]).norm())
        for group in self.param_groups:
            group["d"] = max(group["d"], 0.5 / (1.0 + norm)) * 1.05
            group["largest"] = torch.maximum(group["largest"], torch.tensor(norm))
            for parameter in group["params"]:
                if parameter.grad is not None:
                    scale = group["lr"] * group["d"] / (1.0 + float(group["largest"]))
                    parameter.sub_(parameter.grad, alpha=scale)


class OtherDtypes(torch.optim.Optimizer):
    """Keeps its moments in other dtypes than the weights: one in bfloat16, and the signs of the
    last gradient, in a list, in bytes.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, grad = self.state[parameter], parameter.grad
                if not state:
                    state["half"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    state["signs"] = [torch.zeros_like(parameter, dtype=torch.int8)]
                state["half"].mul_(0.9).add_(grad.to(torch.bfloat16))
                moved = state["half"].to(parameter.dtype) + state["signs"][0].to(parameter.dtype)
                state["signs"] = [grad.sign().to(torch.int8)]
                parameter.sub_(moved, alpha=0.1 * group["lr"])


class Noisy(torch.optim.Optimizer):
    """Adds noise to each element, as Langevin dynamics does. It draws from the generators of the
    weights' device and of Python, from one of its own, and from one of its groups. `pull` is the
    factor of the gradient.
    """

    SCALES = True
    """Multiply the noise of each weight by numbers of Python's generators."""

    def __init__(self, params: Iterable[Any], lr: float = 0.0, pull: float = 1.0) -> None:
        self.generator = torch.Generator()
        self.generator.seed()
        super().__init__(params, {"lr": lr, "pull": pull, "dice": random.Random()})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    part, grad = _local(parameter), _local(parameter.grad)
                    noise = torch.rand(part.shape, generator=self.generator)
                    if self.SCALES:
                        noise *= (0.5 + random.random()) * (0.5 + group["dice"].random())
                    noise = noise.to(part) * torch.randn_like(part)
                    part.add_(noise - group["pull"] * grad, alpha=group["lr"])


class NoisyByElement(Noisy):
    """Draws nothing but a number for each element."""

    SCALES = False


def _local(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return one of these optimizers, or one of torch's."""
    kinds = (Counting, Estimating, Noisy, NoisyByElement, OtherDtypes)
    own = {kind.__name__: kind for kind in kinds}
    found: type[torch.optim.Optimizer] = own.get(name) or getattr(torch.optim, name)
    return found

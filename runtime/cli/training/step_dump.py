"""A replayed step as JSON: its samples, losses of microbatches, and norms."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...checkpoint.storage.local import replace_text
from ...kernel.events import Resumed, StepEnded
from ...kernel.recipe import Batch, Recipe
from ...run.recorded_steps import RecordedStep
from ...run.records import plain
from ...trainer.loss_parts import LossParts

__all__ = ["StepDump"]

_PREFIXES = ("module.", "_orig_mod.")


class StepDump:
    """An observer that notes one step on this rank. Use it as a context around the training."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._samples = ""
        self._losses: list[Tensor] = []
        self._gradients: dict[str, Tensor] = {}
        self._module: nn.Module | None = None
        self._done = 0

    def __enter__(self) -> StepDump:
        self._hook = register_optimizer_step_pre_hook(self._before_update)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def watched(self, recipe: Recipe) -> Recipe:
        """Return the recipe with a loss that is noted. A loss that takes turns, or has parts, is
        left as it is."""
        loss: Callable[[nn.Module, Batch], Tensor] = recipe.loss
        if isinstance(loss, LossParts) or hasattr(loss, "of_update"):
            return recipe

        def noted(module: nn.Module, batch: Batch) -> Tensor:
            value = loss(module, batch)
            if torch.is_grad_enabled() and self._done == self.step - 1:
                self._module = module
                self._losses.append(value.detach())
            return value

        return dataclasses.replace(recipe, loss=noted)

    def receive_samples(self, step: int, samples: str) -> None:
        """See `ReceivesSamples`."""
        if step == self.step:
            self._samples = samples

    def __call__(self, event: Any) -> None:
        if isinstance(event, (Resumed, StepEnded)):
            self._done = event.step

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._module is None or self._done != self.step - 1:
            return
        for name, parameter in self._module.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad.detach()
                grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                for prefix in _PREFIXES:
                    name = name.removeprefix(prefix)
                self._gradients[name] = torch.linalg.vector_norm(grad)

    def write(self, folder: Path, rank: int, found: RecordedStep) -> Path:
        """Write what was noted on this rank, and return the file."""
        norms = {name: figures.norm for name, figures in found.weights.items()}
        content = {
            "step": self.step,
            "rank": rank,
            "samples": self._samples,
            "loss": found.losses.get(self.step),
            "microbatch_losses": [loss.item() for loss in self._losses],
            "gradient_norm": found.logged["grad_norm"],
            "gradient_norms": {name: norm.item() for name, norm in self._gradients.items()},
            "weight_norms": norms,
        }
        path = folder / f"step-{self.step:06d}-rank-{rank}.json"
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(plain(content), indent=1) + "\n")
        return path

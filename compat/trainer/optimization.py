"""The trainer's optimizer and learning rate schedule."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..optim import optimizer_class_and_kwargs
from ..optim.parameters import decay_groups, decayed_names
from ..optim.quantized import keep_embeddings_whole
from ..optim.schedules import follows_a_metric, get_scheduler
from ..parts import TrainerParts
from ..profile import profile_of

__all__ = ["OptimizationMixin"]


class OptimizationMixin(TrainerParts):
    """Builds the optimizer and the schedule of a trainer. Subclasses may override every method."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Build both, unless they exist; `num_training_steps` counts updates.

        The trainer calls this method, which calls the two methods below.
        """
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Return the existing optimizer, or a new one over the trained parameters of `model` (by
        default the trainer's). Norms and biases do not decay.
        """
        if self.optimizer is not None:
            return self.optimizer
        model = self.model if model is None else model
        if self.optimizer_cls_and_kwargs is not None:
            optimizer_class, kwargs = self.optimizer_cls_and_kwargs
        else:
            optimizer_class, kwargs = self.get_optimizer_cls_and_kwargs(self.args, model)
        if not _is_optimizer(optimizer_class):  # an optimizer factory, which needs the model
            self.optimizer = optimizer_class()(model, **kwargs)
            return self.optimizer
        kwargs = dict(kwargs)
        targets = [kwargs.pop(key) for key in _TARGETS if key in kwargs]
        if targets:
            parameters = targets[-1]
        else:
            decayed = self.get_decay_parameter_names(model)
            parameters = decay_groups(model, decayed, self.args.weight_decay)
        self.optimizer = optimizer_class(parameters, **kwargs)
        keep_embeddings_whole(model, optimizer_class, kwargs)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LRScheduler:
        """Return the existing schedule, or a new one over `num_training_steps` updates for
        `optimizer` (by default the trainer's, which must exist).
        """
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            if optimizer is None:
                raise ValueError("create_scheduler needs an optimizer: call create_optimizer first")
            self.lr_scheduler = get_scheduler(
                self.args.lr_scheduler_type,
                optimizer=optimizer,
                num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: Any, model: nn.Module | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Return the class that `args.optim` names, and its keywords, in which `params`, `model` or
        `optimizer_dict` replace the two usual groups. See `optim`.
        """
        return optimizer_class_and_kwargs(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters that decay: all but biases and norms."""
        return decayed_names(model, profile_of(self.args).decays_by_name)

    def get_num_trainable_parameters(self) -> int:
        """Return the number of elements of all trainable parameters."""
        return sum(one.numel() for one in self.model.parameters() if one.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """Return the rate of each parameter group. Raises ValueError before the optimizer
        exists."""
        return [group["lr"] for group in self._optimizer_there_is().param_groups]

    def get_optimizer_group(self, param: str | nn.Parameter | None = None) -> Any:
        """Return the parameter group that holds `param`; without `param`, each group's list of
        parameters.

        Raises ValueError before the optimizer exists, or if no group holds `param`.
        """
        groups = self._optimizer_there_is().param_groups
        if param is None:
            return [group["params"] for group in groups]
        for group in groups:
            if any(one is param for one in group["params"]):
                return group
        raise ValueError("no parameter group of the optimizer holds this parameter")

    def _get_learning_rate(self) -> float:
        """Return the rate of the first group for the next update."""
        if follows_a_metric(self.lr_scheduler):
            rate = self._optimizer_there_is().param_groups[0]["lr"]
        elif self.lr_scheduler is None:
            raise ValueError("there is no learning rate yet: the trainer has no scheduler")
        else:
            rate = self.lr_scheduler.get_last_lr()[0]
        return float(rate)


_TARGETS = ("params", "model", "optimizer_dict")
"""Keywords that replace the usual groups; the last one present counts."""


def _is_optimizer(optimizer_class: Any) -> bool:
    return isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)

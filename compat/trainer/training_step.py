"""One microbatch of training: its loss, the divisor of the loss, and the backward pass."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...kernel.recipe import check_loss
from ..common.loss import count_items, is_causal_lm, loss_of, require_names
from ..common.overrides import is_overridden
from .loading import LoadingMixin

__all__ = ["StepMixin"]

_LOG = logging.getLogger(__name__)


class StepMixin(LoadingMixin):
    """`training_step` and the methods that it calls."""

    loss_is_scaled_for_ga: bool | None = None
    """True if the `compute_loss` of a subclass already divides by the number of batches, or of
    items, of the whole update. None: inferred from the model and the arguments.
    """

    _mode: TrainMode | None = None
    _splits_sequences = False
    """True if a subclass overrides `_prepare_context_parallel_inputs`."""
    current_gradient_accumulation_steps = 1

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run forward and backward of one microbatch. Return its detached loss, as its part of the
        update's loss."""
        if self._splits_sequences:
            return self._step_in_context(model, inputs, num_items_in_batch)
        if self._mode is None or self._mode.model is not model:
            self._mode = TrainMode(model)
        self._mode.enter()
        if callable(switch := getattr(self.optimizer, "train", None)):
            switch()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        del inputs
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            torch.accelerator.empty_cache()
        weight = 1.0
        if not self._loss_is_scaled(num_items_in_batch):
            weight /= self.current_gradient_accumulation_steps
        return self._backward(loss, weight)

    def _step_in_context(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> Tensor:
        context, inputs = self._prepare_context_parallel_inputs(model, inputs)
        self._splits_sequences = False  # the following code runs on split sequences
        try:
            with context():
                return StepMixin.training_step(self, model, inputs, num_items_in_batch)
        finally:
            self._splits_sequences = True

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: Any
    ) -> tuple[Callable[[], AbstractContextManager[Any]], Any]:
        """Return the contexts in which a microbatch is trained; called if a subclass overrides it.
        Here sequences are split already, if a driver splits them.
        """
        return contextlib.nullcontext, inputs

    def _loss_is_scaled(self, num_items_in_batch: Any) -> bool:
        """True if the loss is already divided by the items of the whole update."""
        if self.loss_is_scaled_for_ga is not None:
            return bool(self.loss_is_scaled_for_ga)
        counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return counted or self.compute_loss_func is not None

    def _backward(self, loss: Tensor, weight: float = 1.0) -> Tensor:
        """Add the gradient of `weight * loss`; outside of `train`, call plain `backward`."""
        if self._microstep is None:
            loss = loss * weight
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        if self._microstep.num_feeders > 1 and loss.is_leaf:  # others would wait for gradients
            check_loss(loss, "compute_loss")
        return self._microstep.backward(loss, weight)

    # --- clipping ---------------------------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip the gradients, and return their norm before. Called if a subclass overrides it;
        otherwise, and always under DeepSpeed, the driver clips.
        """
        return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm to log; called if a subclass overrides this method or
        `_clip_grad_norm`."""
        if grad_norm is None:
            grad_norm = self.accelerator.clip_grad_norm_(model.parameters(), math.inf)
        return grad_norm

    def _measures_gradients(self) -> bool:
        return any(is_overridden(type(self), f"_{what}_grad_norm") for what in ("clip", "get"))

    def _own_grad_norm(self) -> Any:
        """Clip and measure by these two methods, after the backward and before the optimizer's
        step."""
        clips = (self.args.max_grad_norm or 0) > 0
        norm = self._clip_grad_norm(self.model_wrapped) if clips else None
        return self._get_grad_norm(self.model_wrapped, grad_norm=norm)

    # --- the loss ---------------------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss of a batch, and the model's outputs if requested. Labels are popped from
        `inputs` for a `compute_loss_func` or label smoothing.
        """
        elsewhere = self.label_smoother is not None or self.compute_loss_func is not None
        require_names(inputs, "compute_loss")
        labels = inputs.pop("labels") if elsewhere and "labels" in inputs else None
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = model(**inputs)
        if self.compute_loss_func is not None:
            if labels is None:
                _LOG.warning("compute_loss_func is called with labels=None: the batch has none")
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif self.label_smoother is not None and labels is not None:
            loss = self.label_smoother(
                outputs,
                labels,
                shift_labels=is_causal_lm(self.model),
                num_items_in_batch=num_items_in_batch,
            )
        else:
            loss = loss_of(outputs, inputs)
        counted = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        averages = self.args.average_tokens_across_devices and num_items_in_batch is not None
        if counted and self.model.training:
            world = self.driver_session.world  # gradients are averaged over its feeders
            loss = loss * (world.num_feeders if averages else world.feeders_per_reader)
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Return the context of the forward and of `compute_loss`."""
        stack, precision = contextlib.ExitStack(), self.autocast_smart_context_manager()
        if type(precision) is not contextlib.nullcontext:
            stack.enter_context(precision)
        return stack

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> AbstractContextManager[Any]:
        """Return the autocast context for the precision of the arguments."""
        return self.driver_session.autocast()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any = None
    ) -> tuple[list[Any], Tensor | int | None]:
        """Return the batches of an update, fewer at the end, and their number of items on this
        rank."""
        batches = list(itertools.islice(epoch_iterator, num_batches))
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Count this rank's labels in these batches; None if the loss does not use the number."""
        uses_count = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if not uses_count or not batch_samples or not isinstance(batch_samples[0], Mapping):
            return None
        return count_items(batch_samples, self._loss_shifts_labels)


_PLAIN = (nn.Module.train, DistributedDataParallel.train)
"""DDP's own `train` only calls the other."""
_is_training = operator.attrgetter("training")


class TrainMode:
    """A faster `model.train()`, which would set the mode of every module: it is called only if a
    module is in another mode. A model that overrides `train` always has it called. Modules that are
    added later are not checked; new modules are in training mode.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modules = list(model.modules())
        self._plain = all(type(part).train in _PLAIN for part in self._modules)

    def enter(self) -> None:
        """Set every module to training mode."""
        if not self._plain or not all(map(_is_training, self._modules)):
            self.model.train()

"""Prepares a model for training, and has the driver wrap it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ...data.parallel import Parallel
from ..arguments.options import refuse_kernels
from ..common.debugging import is_debugged
from ..common.overrides import is_overridden
from ..common.placement import generates_in_step
from ..integrations.liger import apply_liger_kernel
from ..profile import profile_of
from ..theirs import theirs
from .neftune import NeftuneMixin
from .optimization import OptimizationMixin
from .partitioning import partition_plan
from .recompute import enable_recompute

__all__ = ["PreparationMixin"]

_LOG = logging.getLogger(__name__)


def align_special_tokens(model: Any, processing_class: Any) -> None:
    """Set the tokenizer's ids of the padding, begin and end tokens in a model's configurations, if
    they differ: they may have been added for this training.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    config = getattr(model, "config", None)
    if config is None or not hasattr(tokenizer, "eos_token_id"):
        return
    changed = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ours = getattr(tokenizer, name, None)
        for holder in (config, getattr(model, "generation_config", None)):
            if holder is None or not hasattr(holder, name) or ours is None:
                continue
            theirs = getattr(holder, name)
            if ours != theirs and not (isinstance(theirs, list) and ours in theirs):
                setattr(holder, name, ours)
                changed[name] = ours
    if changed:
        _LOG.warning("the model's special tokens now are the tokenizer's: %s", changed)


class PreparationMixin(OptimizationMixin, NeftuneMixin):
    """The model as the driver wraps it, with its optimizer and schedule."""

    def _make_ready(self) -> None:
        """Apply kernels, activation checkpointing, noise and debug hooks of the arguments."""
        args, model = self.args, self.model
        if (args.fp16_full_eval or args.bf16_full_eval) and not self.is_model_parallel:
            self._move_model_to_device(model, args.device)
        if args.use_liger_kernel:
            refuse_kernels(args, self.driver_session.driver.name)
            apply_liger_kernel(model, getattr(args, "liger_kernel_config", None))
        if args.gradient_checkpointing or getattr(args, "activation_checkpointing", None):
            newer = getattr(args, "activation_checkpointing_kwargs", None)
            enable_recompute(model, newer or args.gradient_checkpointing_kwargs)
        align_special_tokens(model, self.processing_class)
        self._activate_neftune(model)
        if is_debugged(args, "underflow_overflow"):
            # kept alive by its hooks; at the first nan or infinity it prints the previous
            # operations, and raises
            theirs("debug_utils", "DebugUnderflowOverflow")(model)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        """Wrap the model, with optimizer and schedule. Return it, and the loader to train on."""
        if self._created_lr_scheduler and self._interrupted is None:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self._max_steps = max_steps
        self.model_wrapped = self._wrap_model(self.model)
        if self.optimizer is None:
            self.optimizer = self.driver_session.wrapped().optimizer
        if self.lr_scheduler is None:
            self.create_scheduler(num_training_steps=max_steps)
        handler = self.callback_handler
        handler.model, handler.optimizer = self.model, self.optimizer
        handler.lr_scheduler, handler.train_dataloader = self.lr_scheduler, train_dataloader
        handler.open_to_writes = self.driver_session.open_to_writes
        return self.model_wrapped, train_dataloader

    def _forget_optimizer_of_others(self) -> None:
        """Drop the optimizer if another Trainer has trained the model since: this optimizer holds
        parameters that the model no longer has."""
        session = self.driver_session
        if session.has_given_back and self.optimizer is not None:
            _LOG.warning("another Trainer has trained this model since: the optimizer starts over")
            self.optimizer = self.lr_scheduler = None
        session.has_given_back = False

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        """Return the module to call: the driver's wrapper once it exists. Idempotent."""
        sharded = self.driver_session.is_sharded()
        if sharded:
            generates_in_step(model)
        self._forget_optimizer_of_others()
        self._names = self._names_in_optimizer(model)
        if training or sharded:
            parallel = self._partition_plan()
            engine = self.driver_session.prepare(
                model, self._build_optimizer, parallel=parallel, **self._changes_of_weights()
            )
            return engine.module
        prepared = self.driver_session.prepared
        if prepared is not None and prepared.model is model:
            return prepared.engine.module
        if self.place_model_on_device:
            self._move_model_to_device(model, self.args.device)
        return model

    def after_update(self, weights: Mapping[str, Tensor], number: int) -> None:
        """Change weights in place after an applied update, by its number from 1: for a moving
        teacher, clipping, projections. Called on every driver if a subclass overrides it, as
        `Recipe.after_update` is. `weights` holds all parameters of the model by name, each as a
        flat tensor of the elements that this rank holds. Each element must be changed by itself,
        from elements at the same place in other weights. Keep nothing between calls: the method may
        be called again.
        """

    def _changes_of_weights(self) -> dict[str, Any]:
        changes = is_overridden(type(self), "after_update")
        return {"after_update": self.after_update} if changes else {}

    def _partition_plan(self) -> Parallel | None:
        """Return the partition plan of the model, with a loss by which drivers compare parts with
        the whole, since subclasses may compute their loss from other batches.
        """
        if (parallel := partition_plan(self)) is None:
            return None
        prepares = any(is_overridden(type(self), n) for n in ("training_step", "_prepare_inputs"))
        return replace(parallel, compare=False if prepares else self._loss_to_compare)

    def _loss_to_compare(self, module: nn.Module, batch: Any) -> Any:
        """Return the loss as a sum, if the loss is divided by a given number of items."""
        counted = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return self.compute_loss(module, dict(batch), num_items_in_batch=1 if counted else None)

    def _build_optimizer(self, named: Iterable[tuple[str, nn.Parameter]]) -> Any:
        """Build the optimizer. The driver calls this when the parameters are in their final
        place."""
        steps = getattr(self, "_max_steps", 0)
        if self.optimizer is None and steps and self._builds_both():
            self.create_optimizer_and_scheduler(num_training_steps=steps)
        else:
            self.create_optimizer()
        self._follow(dict(named))
        return self.optimizer

    def _names_in_optimizer(self, model: nn.Module) -> dict[int, str]:
        """Return the names of the parameters that the optimizer holds already, by `id`. The
        optimizer keeps them alive, so no new parameter can get the same `id`.
        """
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        held = {id(each) for group in groups for each in group["params"]}
        return {id(each): name for name, each in model.named_parameters() if id(each) in held}

    def _follow(self, named: Mapping[str, nn.Parameter]) -> None:
        """Put the driver's parameters into an existing optimizer, in place of those of the same
        names. Copies of HF's training loop build the optimizer first.
        """
        for group in self._optimizer_there_is().param_groups:
            names = [self._names.get(id(each)) for each in group["params"]]
            group["params"] = [
                named.get(name or "", each)
                for name, each in zip(names, group["params"], strict=True)
            ]

    def _builds_both(self) -> bool:
        """True if a subclass overrides `create_optimizer_and_scheduler`, or the profile requires
        it."""
        usual = OptimizationMixin.create_optimizer_and_scheduler
        overridden = type(self).create_optimizer_and_scheduler is not usual
        return overridden or profile_of(self.args).builds_optimizer_and_schedule_at_once

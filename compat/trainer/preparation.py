"""Prepares a model for training, and has the driver wrap it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ...data.parallel import Parallel
from ..arguments.options import refuse_kernels
from ..integrations.liger import apply_liger_kernel
from ..integrations.neftune import NeftuneMixin
from ..optim.build import OptimizationMixin
from ..profile import profile_of
from ..theirs import theirs
from .cutting import how_to_cut
from .debugging import is_debugged
from .overrides import is_overridden
from .placement import generates_in_step
from .recompute import enable_recompute

__all__ = ["PreparationMixin"]

_LOG = logging.getLogger(__name__)


def align_special_tokens(model: Any, processing_class: Any) -> None:
    """Give a model's configurations the tokenizer's ids of the padding, begin and end tokens,
    where they differ: they may have been added for this training.
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
        """Kernels, recomputed activations, noise, watches: what the arguments ask for."""
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
            # its hooks hold it: at the first nan or infinity it prints what led there, and raises
            theirs("debug_utils", "DebugUnderflowOverflow")(model)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        """The model wrapped, with optimizer and schedule; it, and the loader to train on."""
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
        return self.model_wrapped, train_dataloader

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        """The module to call: the driver's wrapper once there is one. Idempotent."""
        sharded = self.driver_session.is_sharded()
        if sharded:
            generates_in_step(model)
        self._names = self._names_in_optimizer(model)
        if training or sharded:
            parallel = self._cut_by()
            engine = self.driver_session.prepare(model, self._build_optimizer, parallel=parallel)
            return engine.module
        prepared = self.driver_session.prepared
        if prepared is not None and prepared.model is model:
            return prepared.engine.module
        if self.place_model_on_device:
            self._move_model_to_device(model, self.args.device)
        return model

    def _cut_by(self) -> Parallel | None:
        """How a driver may cut the model, and a loss by which it compares parts with the whole;
        subclasses may compute theirs of other batches.
        """
        if (parallel := how_to_cut(self)) is None:
            return None
        prepares = any(is_overridden(type(self), n) for n in ("training_step", "_prepare_inputs"))
        return replace(parallel, compare=False if prepares else self._loss_to_compare)

    def _loss_to_compare(self, module: nn.Module, batch: Any) -> Any:
        """A sum, where a loss is divided by the items that it is told."""
        counted = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return self.compute_loss(module, dict(batch), num_items_in_batch=1 if counted else None)

    def _build_optimizer(self, named: Iterable[tuple[str, nn.Parameter]]) -> Any:
        """Called by the driver, when the parameters are where they will be trained."""
        steps = getattr(self, "_max_steps", 0)
        if self.optimizer is None and steps and self._builds_both():
            self.create_optimizer_and_scheduler(num_training_steps=steps)
        else:
            self.create_optimizer()
        self._follow(dict(named))
        return self.optimizer

    def _names_in_optimizer(self, model: nn.Module) -> dict[int, str]:
        """Of the parameters that an optimizer holds already, by `id`: no new one takes,
        meanwhile, the place of one of them in memory.
        """
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        held = {id(each) for group in groups for each in group["params"]}
        return {id(each): name for name, each in model.named_parameters() if id(each) in held}

    def _follow(self, named: Mapping[str, nn.Parameter]) -> None:
        """Where the optimizer is older than the driver's parameters, as in loops that are copies of
        HF's, have it hold these in the place of those of the same names.
        """
        for group in self._optimizer_there_is().param_groups:
            names = [self._names.get(id(each)) for each in group["params"]]
            group["params"] = [
                named.get(name or "", each)
                for name, each in zip(names, group["params"], strict=True)
            ]

    def _builds_both(self) -> bool:
        """True if a subclass overrides `create_optimizer_and_scheduler`, or a profile asks."""
        usual = OptimizationMixin.create_optimizer_and_scheduler
        overridden = type(self).create_optimizer_and_scheduler is not usual
        return overridden or profile_of(self.args).builds_optimizer_and_schedule_at_once

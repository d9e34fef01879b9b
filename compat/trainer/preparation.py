"""What is done to a model before it is trained."""

from __future__ import annotations

import logging
from typing import Any

from ..integrations.liger import apply_liger_kernel
from .debugging import is_debugged
from .overflow import OverflowWatch
from .recompute import enable_recompute

__all__ = ["make_ready"]

_LOG = logging.getLogger(__name__)


def make_ready(trainer: Any) -> None:
    """Kernels, recomputed activations, noise, watches: what the arguments ask for."""
    args, model = trainer.args, trainer.model
    if (args.fp16_full_eval or args.bf16_full_eval) and not trainer.is_model_parallel:
        trainer._move_model_to_device(model, args.device)
    if args.use_liger_kernel:
        apply_liger_kernel(model, getattr(args, "liger_kernel_config", None))
    if args.gradient_checkpointing or getattr(args, "activation_checkpointing", None):
        newer = getattr(args, "activation_checkpointing_kwargs", None)
        enable_recompute(model, newer or args.gradient_checkpointing_kwargs)
    align_special_tokens(model, trainer.processing_class)
    trainer._activate_neftune(model)
    if is_debugged(args, "underflow_overflow"):
        trainer._overflow_watch = OverflowWatch(model)


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

"""Refuses models that cannot be trained in their present form, or not on the selected driver."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from ..arguments.driver_session import DriverSession
from ..common.inspection import is_peft_model
from ..errors import ArgumentError, ArgumentRefused

__all__ = ["refuse_untrainable"]


def refuse_untrainable(model: nn.Module, session: DriverSession) -> None:
    """Raises `ArgumentError` for a quantized model that cannot be trained, and `ArgumentRefused`
    for a model whose weights this driver cannot hold.
    """
    parts = sys.modules.get("torch.distributed.tensor")  # else no such models exist
    if parts and any(isinstance(each, parts.DTensor) for each in model.parameters()):
        raise ArgumentRefused(
            "a model whose weights lie in parts already",
            session.driver.name,
            "its driver partitions weights itself. If another Trainer has partitioned this model, "
            "call save_model there, and load it again for this one. Else load it without tp_plan "
            "and distributed_config, and choose backend='fsdp' or 'deepspeed' to shard weights, "
            "parallelism_config for layers (tp_size) and sequences (cp_size), and backend='mesh' "
            "with backend_options={'expert': 2} for experts",
        )
    if getattr(model, "is_quantized", False):
        _refuse_quantized(model)
        if session.is_sharded():
            raise ArgumentRefused(
                "a quantized model",
                session.driver.name,
                "packed weights cannot be sharded over its ranks; use backend='ddp', which "
                "keeps them whole and averages the gradients of the adapters",
            )


def _refuse_quantized(model: Any) -> None:
    """Refuse quantized models that cannot be trained. Quantized weights are integers, so only
    adapters can be trained, or, for methods that support it, the weights from which the integers
    are rounded.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if getattr(model, "_hf_peft_config_loaded", False):
        return
    if hasattr(model, "_orig_mod"):
        raise ArgumentError(
            "the model is quantized and compiled: give it as it was before torch.compile, and set "
            "torch_compile=True once it is no longer quantized"
        )
    if not is_peft_model(model) and not getattr(quantizer, "is_qat_trainable", False):
        raise ArgumentError(
            "the model is quantized, and its weights cannot be trained: add adapters to it, for "
            "example by peft.get_peft_model(model, peft.LoraConfig(...))"
        )
    if not getattr(quantizer, "is_trainable", False):
        method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
        raise ArgumentError(
            f"the model is quantized by {method}, which gives no gradients even to adapters: load "
            "it unquantized, or by another method, such as bitsandbytes"
        )

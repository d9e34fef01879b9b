"""Models that cannot be trained as they are, or not where the arguments put them."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from ..arguments.driver_session import DriverSession
from ..errors import ArgumentError, ArgumentRefused
from .inspection import is_peft_model

__all__ = ["refuse_untrainable"]


def refuse_untrainable(model: nn.Module, session: DriverSession) -> None:
    """Raises `ArgumentError` for a quantized model that nothing can train, and `ArgumentRefused`
    for a model whose weights this driver cannot hold.
    """
    parts = sys.modules.get("torch.distributed.tensor")  # where nobody imported it, there are none
    if parts and any(isinstance(each, parts.DTensor) for each in model.parameters()):
        raise ArgumentRefused(
            "a model that was cut into parts when it was loaded",
            session.driver.name,
            "its driver deals out weights by itself: load the model without tp_plan and "
            "distributed_config, and choose backend='fsdp' or 'deepspeed' to cut weights, "
            "parallelism_config for layers (tp_size) and sequences (cp_size), and backend='mesh' "
            "with backend_options={'expert': 2} for experts",
        )
    if getattr(model, "is_quantized", False):
        _refuse_quantized(model)
        if session.is_sharded():
            raise ArgumentRefused(
                "a quantized model",
                session.driver.name,
                "packed weights cannot be cut into parts for its ranks; use backend='ddp', which "
                "keeps them whole and averages the gradients of the adapters",
            )


def _refuse_quantized(model: Any) -> None:
    """The weights are whole numbers: what is trained are adapters beside them, or, for a method
    made for it, the weights that the numbers are rounded from.
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
            "the model is quantized, and its weights cannot be trained: add adapters to it, by "
            "peft.get_peft_model(model, peft.LoraConfig(...)) say"
        )
    if not getattr(quantizer, "is_trainable", False):
        method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
        raise ArgumentError(
            f"the model is quantized by {method}, which gives no gradients even to adapters: load "
            "it unquantized, or by another method (bitsandbytes, say)"
        )

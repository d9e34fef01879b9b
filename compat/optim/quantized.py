"""Optimizers with states of few bits: bitsandbytes and torchao."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from .request import Request, library

__all__ = ["QUANTIZED", "keep_embeddings_whole"]

_log = logging.getLogger(__name__)

Built = tuple[Any, dict[str, Any]]


def _bitsandbytes(request: Request) -> Built:
    module = library("bitsandbytes.optim", request.name, "bitsandbytes")
    name = request.name
    bits: dict[str, Any] = {"optim_bits": 8 if "8bit" in name else 32}
    if "rmsprop" in name:
        return module.RMSprop, {**request.rmsprop, **bits}
    bits["is_paged"] = "paged" in name
    if "lion" in name:
        return module.Lion, {**request.lr, "betas": request.betas, **bits}
    if "ademamix" in name:
        return module.AdEMAMix, {**request.lr, **_ademamix(request), **bits}
    return module.AdamW, {**request.adam, **bits}


def _ademamix(request: Request) -> dict[str, Any]:
    options = request.options
    beta1, beta2 = map(float, request.betas)
    betas = options.filled(beta1=beta1, beta2=beta2, beta3=0.9999)
    return {
        "betas": tuple(betas.values()),
        **options.filled(alpha=5.0, eps=float(request.args.adam_epsilon)),
        **options.given(t_alpha=int, t_beta3=int),
    }


def _torchao(request: Request) -> Built:
    module = library("torchao.optim", request.name, "torchao")
    cls = module.AdamW4bit if request.name.endswith("4bit") else module.AdamW8bit
    return cls, {
        **request.adam,
        **request.options.filled(block_size=256, bf16_stochastic_round=False),
    }


def keep_embeddings_whole(model: nn.Module, optimizer_class: Any, kwargs: dict[str, Any]) -> None:
    """Use 32-bit optimizer states for embeddings if an optimizer of bitsandbytes would use 8 bits.

    Their gradients are too uneven for fewer: https://arxiv.org/abs/2110.02861, section 2.3.
    """
    if "bitsandbytes" not in str(optimizer_class) or kwargs.get("optim_bits") != 8:
        return
    manager = library("bitsandbytes.optim", "8 bits", "bitsandbytes").GlobalOptimManager
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            _log.info("the optimizer keeps 32 bits for %s", name)
            manager.get_instance().register_module_override(module, "weight", {"optim_bits": 32})


_BITSANDBYTES = (
    "adamw_8bit adamw_bnb_8bit ademamix ademamix_8bit lion_32bit lion_8bit paged_adamw_32bit"
    " paged_adamw_8bit paged_ademamix_32bit paged_ademamix_8bit paged_lion_32bit paged_lion_8bit"
    " rmsprop_bnb rmsprop_bnb_32bit rmsprop_bnb_8bit"
)

QUANTIZED = {
    **dict.fromkeys(_BITSANDBYTES.split(), _bitsandbytes),
    "adamw_torch_4bit": _torchao,
    "adamw_torch_8bit": _torchao,
}
"""The builders of optimizers, by name."""

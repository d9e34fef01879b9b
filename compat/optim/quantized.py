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
        given = request.options
        numbers = given.numbers("alpha", "eps", "weight_decay", "momentum")
        return module.RMSprop, {**request.lr, **numbers, **given.flags("centered"), **bits}
    bits["is_paged"] = "paged" in name
    if "lion" in name:
        return module.Lion, {**request.lr, "betas": request.betas, **bits}
    if "ademamix" in name:
        return module.AdEMAMix, {**request.lr, **_ademamix(request), **bits}
    return module.AdamW, {**request.adam, **bits}


def _ademamix(request: Request) -> dict[str, Any]:
    args, given = request.args, request.options
    betas = (
        given.number("beta1", args.adam_beta1),
        given.number("beta2", args.adam_beta2),
        given.number("beta3", 0.9999),
    )
    ramps = {name: given.integer(name, 0) for name in ("t_alpha", "t_beta3") if name in given}
    alpha, eps = given.number("alpha", 5.0), given.number("eps", args.adam_epsilon)
    return {"betas": betas, "alpha": alpha, "eps": eps, **ramps}


def _torchao(request: Request) -> Built:
    module = library("torchao.optim", request.name, "torchao")
    cls = module.AdamW4bit if request.name.endswith("4bit") else module.AdamW8bit
    given = request.options
    return cls, {
        **request.adam,
        "block_size": given.integer("block_size", 256),
        "bf16_stochastic_round": given.flag("bf16_stochastic_round"),
    }


def keep_embeddings_whole(model: nn.Module, optimizer_class: Any, kwargs: dict[str, Any]) -> None:
    """Give embeddings states of 32 bits where an optimizer of bitsandbytes would use 8.

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

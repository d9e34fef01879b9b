"""Optimizers that need no model: torch's, and those of small libraries."""

from __future__ import annotations

from typing import Any

import torch

from .request import Request, library

__all__ = ["TORCH_OPTIM"]

Built = tuple[Any, dict[str, Any]]


def _adamw(request: Request) -> Built:
    return torch.optim.AdamW, request.adam


def _fused_adamw(request: Request) -> Built:
    return torch.optim.AdamW, {**request.adam, "fused": True}


def _xla_adamw(request: Request) -> Built:
    module = library("torch_xla.amp.syncfree", request.name, "torch_xla")
    return module.AdamW, request.adam


def _npu_adamw(request: Request) -> Built:
    module = library("torch_npu.optim", request.name, "torch_npu")
    return module.NpuFusedAdamW, request.adam


def _anyprecision_adamw(request: Request) -> Built:
    module = library("torchdistx.optimizers", request.name, "torchdistx")  # built from source
    dtypes = request.options.filled(
        momentum_dtype="float32", variance_dtype="float32", compensation_buffer_dtype="bfloat16"
    )
    return module.AnyPrecisionAdamW, {
        **request.adam,
        **request.options.filled(use_kahan_summation=False),
        **{name: getattr(torch, dtype) for name, dtype in dtypes.items()},
    }


def _sgd(request: Request) -> Built:
    given = request.options.given(
        momentum=float, dampening=float, weight_decay=float, nesterov=bool
    )
    return torch.optim.SGD, {**request.lr, **given}


def _adagrad(request: Request) -> Built:
    given = request.options.given(lr_decay=float, weight_decay=float, eps=float)
    return torch.optim.Adagrad, {**request.lr, **given}


def _rmsprop(request: Request) -> Built:
    return torch.optim.RMSprop, request.rmsprop


def _adafactor(request: Request) -> Built:
    module = library("transformers.optimization", request.name, "transformers")
    return module.Adafactor, {**request.lr, "scale_parameter": False, "relative_step": False}


def _grokadamw(request: Request) -> Built:
    module = library("grokadamw", request.name, "grokadamw")
    numbers = request.options.filled(
        alpha_init=0.98,
        lamb=2.0,
        gamma=0.1,
        grokking_signal_decay_rate=0.1,
        gradient_clipping=1.0,
    )
    return module.GrokAdamW, {**request.lr, **numbers}


def _stable_adamw(request: Request) -> Built:
    module = library("optimi", request.name, "torch-optimi")
    return module.StableAdamW, {
        **request.adam,
        "weight_decay": request.args.weight_decay,
        **request.options.filled(decouple_lr=False),
        "max_lr": None,
        "kahan_sum": None,
        **request.options.given(max_lr=float, kahan_sum=bool),
    }


def _schedule_free(request: Request) -> Built:
    module = library("schedulefree", request.name, "schedulefree")
    kind = request.name.removeprefix("schedule_free_")
    numbers = {"sgd": request.lr}.get(kind, request.adam)
    if kind != "radam":  # which has its own warm-up
        numbers = {**numbers, "warmup_steps": _warmup_steps(request)}
    cls = {
        "adamw": "AdamWScheduleFree",
        "radam": "RAdamScheduleFree",
        "sgd": "SGDScheduleFree",
    }[kind]
    return getattr(module, cls), {
        **numbers,
        "weight_decay": request.args.weight_decay,
        **request.options.filled(weight_lr_power=2.0, r=0.0),
    }


def _warmup_steps(request: Request) -> int:
    steps, total = request.args.warmup_steps, request.args.max_steps
    if 0 < steps < 1:
        if total <= 0:
            raise ValueError(
                f"warmup_steps={steps} is a share of all steps, which {request.name} must know"
                " when it is built: give a number of steps, or max_steps"
            )
        return int(request.args.get_warmup_steps(total))
    return int(steps)


TORCH_OPTIM = {
    "adafactor": _adafactor,
    "adagrad": _adagrad,
    "adamw_anyprecision": _anyprecision_adamw,
    "adamw_torch": _adamw,
    "adamw_torch_fused": _fused_adamw,
    "adamw_torch_npu_fused": _npu_adamw,
    "adamw_torch_xla": _xla_adamw,
    "grokadamw": _grokadamw,
    "rmsprop": _rmsprop,
    "schedule_free_adamw": _schedule_free,
    "schedule_free_radam": _schedule_free,
    "schedule_free_sgd": _schedule_free,
    "sgd": _sgd,
    "stable_adamw": _stable_adamw,
}
"""The builders of optimizers, by name."""

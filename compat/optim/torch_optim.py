"""Optimizers that need nothing but their numbers: torch's, and those of small libraries."""

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
    given = request.options
    dtypes = {
        name: getattr(torch, given.text(name, default))
        for name, default in (
            ("momentum_dtype", "float32"),
            ("variance_dtype", "float32"),
            ("compensation_buffer_dtype", "bfloat16"),
        )
    }
    kahan = given.flag("use_kahan_summation")
    return module.AnyPrecisionAdamW, {**request.adam, "use_kahan_summation": kahan, **dtypes}


def _sgd(request: Request) -> Built:
    numbers = request.options.numbers("momentum", "dampening", "weight_decay")
    return torch.optim.SGD, {**request.lr, **numbers, **request.options.flags("nesterov")}


def _adagrad(request: Request) -> Built:
    numbers = request.options.numbers("lr_decay", "weight_decay", "eps")
    return torch.optim.Adagrad, {**request.lr, **numbers}


def _rmsprop(request: Request) -> Built:
    numbers = request.options.numbers("momentum", "alpha", "eps", "weight_decay")
    return torch.optim.RMSprop, {**request.lr, **numbers, **request.options.flags("centered")}


def _adafactor(request: Request) -> Built:
    module = library("transformers.optimization", request.name, "transformers")
    return module.Adafactor, {**request.lr, "scale_parameter": False, "relative_step": False}


def _grokadamw(request: Request) -> Built:
    module = library("grokadamw", request.name, "grokadamw")
    defaults = {
        "alpha_init": 0.98,
        "lamb": 2.0,
        "gamma": 0.1,
        "grokking_signal_decay_rate": 0.1,
        "gradient_clipping": 1.0,
    }
    numbers = {name: request.options.number(name, value) for name, value in defaults.items()}
    return module.GrokAdamW, {**request.lr, **numbers}


def _stable_adamw(request: Request) -> Built:
    module = library("optimi", request.name, "torch-optimi")
    given = request.options
    return module.StableAdamW, {
        **request.adam,
        "weight_decay": request.args.weight_decay,
        "decouple_lr": given.flag("decouple_lr"),
        "max_lr": given.number("max_lr", 0.0) if "max_lr" in given else None,
        "kahan_sum": given.flag("kahan_sum") if "kahan_sum" in given else None,
    }


def _schedule_free(request: Request) -> Built:
    module = library("schedulefree", request.name, "schedulefree")
    kind = request.name.removeprefix("schedule_free_")
    numbers = {"sgd": request.lr}.get(kind, request.adam)
    if kind != "radam":  # which warms up by itself
        numbers = {**numbers, "warmup_steps": _warmup_steps(request)}
    cls = {
        "adamw": "AdamWScheduleFree",
        "radam": "RAdamScheduleFree",
        "sgd": "SGDScheduleFree",
    }[kind]
    return getattr(module, cls), {
        **numbers,
        "weight_decay": request.args.weight_decay,
        "weight_lr_power": request.options.number("weight_lr_power", 2.0),
        "r": request.options.number("r", 0.0),
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

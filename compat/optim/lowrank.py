"""Optimizers that need the model: low-rank ones (GaLore, Apollo), and those inside backward
(LOMO)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from ..cuda import has_cuda
from ..theirs import theirs
from .layerwise import LayerWiseDummyOptimizer
from .request import Request, library

__all__ = ["LOW_RANK"]

_log = logging.getLogger(__name__)

Built = tuple[Any, dict[str, Any]]


def _galore(request: Request) -> Built:
    module = library("galore_torch", request.name, "galore-torch")
    low_rank = request.options.filled(rank=128, update_proj_gap=200, scale=0.25, proj_type="std")
    if "adafactor" in request.name:
        fixed = {"scale_parameter": False, "relative_step": False}
        return _low_rank(request, module.GaLoreAdafactor, low_rank, fixed)
    if "8bit" in request.name:
        return _low_rank(request, module.GaLoreAdamW8bit, low_rank, {})
    return _low_rank(request, module.GaLoreAdamW, low_rank, {"no_deprecation_warning": True})


def _apollo(request: Request) -> Built:
    module = library("apollo_torch", request.name, "apollo-torch")
    given = request.options.filled(
        rank=128,
        proj="random",
        scale_type="channel",
        update_proj_gap=200,
        scale=1.0,
        proj_type="std",
    )
    low_rank = {**given, "betas": request.betas, "eps": request.args.adam_epsilon}
    return _low_rank(request, module.APOLLOAdamW, low_rank, {})


def _low_rank(
    request: Request, optimizer_class: Any, low_rank: dict[str, Any], fixed: dict[str, Any]
) -> Built:
    """Return the class and keywords with two groups; the second group is projected."""
    layerwise = request.name.endswith("_layerwise")
    if layerwise:
        _check_in_backward(request)
    model = request.wanted_model()
    targets = _target_weights(request, model)
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    others = [one for name, one in named if name not in targets]
    projected = [one for name, one in named if name in targets]
    kwargs = {**request.lr, **fixed}
    groups = [{"params": others}, {"params": projected, **low_rank}]
    if not layerwise:
        return optimizer_class, {**kwargs, "params": groups}
    one_each = {
        parameter: optimizer_class([{**group, "params": [parameter]}], **kwargs)
        for group in groups
        for parameter in group["params"]
    }
    return LayerWiseDummyOptimizer, {**request.lr, "optimizer_dict": one_each}


def _check_in_backward(request: Request) -> None:
    """Refuse arguments that need all gradients before an update."""
    args, name = request.args, f"optim={request.name!r} updates inside backward"
    if args.world_size > 1:
        raise NotImplementedError(
            f"{name}, before gradients are averaged over ranks; it runs in one process, not in"
            f" {args.world_size}"
        )
    if args.gradient_accumulation_steps != 1:
        raise ValueError(
            f"{name}, so gradients cannot be accumulated: gradient_accumulation_steps is"
            f" {args.gradient_accumulation_steps}, set it to 1"
        )
    if args.fp16:
        raise ValueError(f"{name}, where fp16 has its gradients scaled; use bf16=True")
    if args.max_grad_norm:
        _log.warning("%s: max_grad_norm=%s cannot clip", name, args.max_grad_norm)


def _target_weights(request: Request, model: nn.Module) -> set[str]:
    targets = request.args.optim_target_modules
    if targets is None:
        raise ValueError(
            f"optim={request.name!r} needs optim_target_modules: names, parts of names or patterns"
            " of the linear layers to project, or 'all-linear'"
        )
    if not isinstance(targets, str | list | tuple):
        raise TypeError(
            f"optim_target_modules is a list of strings, a pattern or 'all-linear', not {targets!r}"
        )
    matches = theirs("trainer_utils", "check_target_module_exists")
    every = isinstance(targets, str) and targets.replace("_", "-") == "all-linear"
    found = set()
    for name, module in model.named_modules():
        wanted, by_pattern = matches(targets, name, return_is_regex=True)
        if isinstance(module, nn.Linear):
            if wanted or every:
                found.add(f"{name}.weight")
        elif wanted and not by_pattern:
            _log.warning("%s is not a linear layer; %s does not change it", name, request.name)
    if not found:
        raise ValueError(
            f"optim_target_modules={targets!r} names no linear layer of {type(model).__name__}"
        )
    return found


class InBackward:
    """Adapts LOMO's optimizers to any backward, at the rate of their parameter group."""

    param_groups: list[dict[str, Any]]
    grad_func: Callable[[Any], Any]

    @property
    def lr(self) -> float:
        """The rate at which parameters are updated, inside the next backward."""
        return float(self.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        if hasattr(self, "param_groups"):  # the constructor stores it before groups exist
            self.param_groups[0]["lr"] = value

    def step(self, closure: Any = None) -> None:
        """Update the parameter of the last gradient, after which no hook is called."""
        self.grad_func(None)


def _lomo(request: Request) -> Built:
    _check_in_backward(request)
    model = request.wanted_model()
    module = library("lomo_optim", request.name, "lomo-optim")
    if request.name == "adalomo" and not has_cuda():
        raise RuntimeError(
            "optim='adalomo': lomo-optim keeps its state on a CUDA device, and there is none;"
            " optim='lomo' or 'adafactor' runs here"
        )
    base = module.AdaLomo if request.name == "adalomo" else module.Lomo
    return type(base.__name__, (InBackward, base), {}), {**request.lr, "model": model}


_GALORE = (
    "galore_adafactor galore_adafactor_layerwise galore_adamw galore_adamw_8bit"
    " galore_adamw_8bit_layerwise galore_adamw_layerwise"
)

LOW_RANK = {
    **dict.fromkeys(_GALORE.split(), _galore),
    "adalomo": _lomo,
    "apollo_adamw": _apollo,
    "apollo_adamw_layerwise": _apollo,
    "lomo": _lomo,
}
"""The builders of optimizers, by name."""

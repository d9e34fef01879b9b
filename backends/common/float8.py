"""The matrix products of linear layers in float8, by torchao.

What `precision=float8` adds to bf16: inputs and weights are scaled and rounded to e4m3 (four
significant bits), gradients to e5m2 (three), and multiplied so (https://arxiv.org/abs/2209.05433).
The forward of a layer is replaced, not the layer: its class, names, hooks and weights stay as they
are, and outside of `Engine.autocast` it computes as it did.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...kernel.errors import BackendUnavailable, RecipeError
from ...kernel.plan import Plan
from .accelerators import facts_of

__all__ = ["Float8Options", "compute_in_float8", "promised"]

_LOG = logging.getLogger(__name__)

_MULTIPLE = 16
"""Divisor of both sizes of a layer; float8 products, forward and backward, need it."""


@dataclass(frozen=True)
class Float8Options:
    """Options of a driver that promises float8. Without `precision=float8` they do nothing."""

    float8_skip: tuple[str, ...] | None = None
    """Names of linear layers, or patterns of them (`fnmatch`), that stay in bfloat16; by default
    the last in the order of the model's modules, which is the head of most. What is no plain
    `nn.Linear`, or has a size that 16 does not divide, stays so, too."""
    float8_scaling: Literal["tensorwise", "rowwise"] = "tensorwise"
    """Scope of a scale: a tensor, or each row (each column, where columns are added up). `rowwise`
    is slower, more accurate, and rounds gradients to e4m3, too.
    """
    float8_emulated: bool = False
    """Compute the same numbers in float32, slowly, where the device cannot: to try float8 out."""


def promised(options: Float8Options, device: torch.device) -> dict[str, Any]:
    """The fields of `Capabilities` on precisions, of a driver that has float8 where it can."""
    why = _lacking(options, device)
    without = facts_of(device.type).precisions
    if why:
        return {"precisions": without, "why_not": {"float8": why}}
    return {"precisions": without | {"float8"}}


def _lacking(options: Float8Options, device: torch.device) -> str:
    """Say why float8 cannot be used here and what to do; return an empty string if it can."""
    if importlib.util.find_spec("torchao") is None:
        return "it needs torchao. Install it with: pip install 'drivetrain[float8]'"
    if options.float8_emulated:
        return ""
    or_else = "Take precision=bf16, or to try its numbers out, slowly, backend.float8_emulated=true"
    needed = facts_of(device.type).float8
    if needed is None:
        return f"the {device.type.upper()} does not multiply in it. {or_else}"
    if (has := torch.get_device_module(device).get_device_capability(device)) < needed:
        shown, wanted = (".".join(map(str, each)) for each in (has, needed))
        return f"this card has compute capability {shown}, and it needs {wanted}. {or_else}"
    return ""


def compute_in_float8(module: nn.Module, plan: Plan) -> None:
    """Under autocast the linear layers that fit compute in float8, if the plan says so; if not,
    none does, also where an earlier plan had said so of this module. Raises `RecipeError` where no
    layer fits, or a pattern of `float8_skip` matches none."""
    for part in module.modules():
        if getattr(part.forward, "func", None) is _linear:
            del part.forward
    if plan.precision.linear is None:
        return
    options: Float8Options = plan.options or Float8Options()
    layers = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    skipped = _skipped(list(layers), options.float8_skip)
    chosen = [part for name, part in layers.items() if name not in skipped and _fits(part)]
    if not chosen:
        raise RecipeError(
            f"precision=float8, and none of {len(layers)} linear layers is computed in it: it "
            f"takes an nn.Linear whose sizes {_MULTIPLE} divides, and that backend.float8_skip "
            "does not name (by default the last). Take precision=bf16"
        )
    _LOG.info("%d of %d linear layers compute in float8", len(chosen), len(layers))
    for part in chosen:
        part.forward = partial(_linear, part, part.forward, _like(part, options))  # type: ignore[method-assign]


def _skipped(names: list[str], patterns: tuple[str, ...] | None) -> set[str]:
    if patterns is None:
        return set(names[-1:])
    found = {pattern: fnmatch.filter(names, pattern) for pattern in patterns}
    if missing := [pattern for pattern, matched in found.items() if not matched]:
        raise RecipeError(
            f"backend.float8_skip={','.join(missing)} matches no linear layer; there are "
            f"{', '.join(names)}"
        )
    return {name for matched in found.values() for name in matched}


def _fits(part: nn.Linear) -> bool:
    # a class of one's own, or a forward of one's own, computes something else
    plain = type(part) is nn.Linear and "forward" not in vars(part)
    return plain and not any(size % _MULTIPLE for size in part.weight.shape)


def _like(part: nn.Linear, options: Float8Options) -> nn.Module:
    """A layer of torchao's, which is lent the weights of this one for each call."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise BackendUnavailable(
            f"precision=float8 needs torchao, and the one here cannot be imported with torch "
            f"{torch.__version__}: {error}. Install those that go together, or take precision=bf16"
        ) from error
    sizes, has_bias = (part.in_features, part.out_features), part.bias is not None
    config = Float8LinearConfig.from_recipe_name(options.float8_scaling)
    # gradients of weights add up over tokens, of which there may be any number
    config = dataclasses.replace(config, emulate=options.float8_emulated, pad_inner_dim=True)
    placeholder = nn.Linear(*sizes, bias=has_bias, device="meta")
    like: nn.Module = convert_to_float8_training(placeholder, config=config)
    return like


def _linear(
    part: nn.Linear, plain: Callable[[Tensor], Tensor], like: nn.Module, input: Tensor
) -> Tensor:
    kind = input.device.type
    if not torch.is_autocast_enabled(kind):
        return plain(input)
    lent = {name: getattr(part, name) for name, _ in like.named_parameters()}
    dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):  # it would round what is emulated once more
        output: Tensor = functional_call(like, lent, (input.to(dtype),))
    return output

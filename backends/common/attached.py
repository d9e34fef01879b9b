"""Attributes and hooks that users attach to parameters.

A driver that replaces the user's parameter by another one copies the attributes, so that
`recipe.optimizer` sees them. A hook is given the gradient of one microbatch on one rank. A sum over
microbatches and ranks follows, so only a linear hook gives the result of one process; any other is
refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...kernel.contract import World
from ...kernel.errors import RecipeError
from ...kernel.plan import Plan
from .tried_gradients import Like, is_linear

__all__ = [
    "NOT_LINEAR",
    "attributes_of",
    "carry_hooks",
    "describe_hook",
    "hooks_of",
    "in_place_of",
    "refuse_inexact_hooks",
    "set_attributes",
    "sums_parts",
]

Hook = Callable[[Tensor], Any]

NOT_LINEAR = "it is not linear: what it returns of a sum is not the sum of what it returns"

_NOTES = ("_is_param", "is_external_param", "nvme_swapper")
"""Attributes that torch sets on a DTensor, and DeepSpeed on what it shards."""


def attributes_of(parameter: Tensor) -> dict[str, Any]:
    """The attributes that users or their libraries set on a parameter; DeepSpeed's are left out."""
    if not type(parameter).__module__.startswith(("torch.nn.", "torch.distributed.")):
        return {}  # another library's class, which keeps attributes of its own
    return {
        name: value
        for name, value in vars(parameter).items()
        if name not in _NOTES
        and not name.startswith(("ds_", "_ds_"))
        and not str(getattr(value, "__module__", "")).startswith("deepspeed")
    }


def in_place_of(parameter: Tensor, data: Tensor) -> nn.Parameter:
    """A parameter of these elements with the attributes of the one that it stands for."""
    made = nn.Parameter(data, parameter.requires_grad)
    set_attributes(made, attributes_of(parameter))
    return made


def set_attributes(parameter: Tensor, attributes: Mapping[str, Any]) -> None:
    """Set those that the parameter does not have."""
    for name in attributes.keys() - vars(parameter).keys():
        setattr(parameter, name, attributes[name])


def carry_hooks(old: Tensor, new: Tensor) -> None:
    """Register the hooks of `old` on `new`, a leaf that holds the same elements."""
    for hook in hooks_of(old):
        new.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in _after_accumulation(old):
        new.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def hooks_of(parameter: Tensor) -> Sequence[Hook]:
    """The functions given to `Tensor.register_hook`, in order."""
    return list((parameter._backward_hooks or {}).values())


def _after_accumulation(parameter: Tensor) -> Sequence[Hook]:
    found: Mapping[int, Hook] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return list(found.values())


def refuse_inexact_hooks(
    named: Mapping[str, Tensor], plan: Plan, world: World, *, takes_gradients: bool = False
) -> None:
    """Raise `RecipeError` for a hook on a parameter that would not give the result of one process.

    Call it before any library has registered hooks of its own. `takes_gradients`: the library that
    this driver uses removes gradients as they come, also on one rank. A hook is tried on random
    gradients, unless the gradient that it gets is that of the whole update: in one process, with
    one microbatch an update, without loss scaling.
    """
    parts = sums_parts(plan, world)
    for name, parameter in named.items():
        after = _after_accumulation(parameter)
        if after and (parts or takes_gradients):
            raise RecipeError(
                f"{describe_hook(after[0])} is registered on parameter {name!r} by "
                "register_post_accumulate_grad_hook: it would be called for each microbatch and "
                "rank, with a gradient that is not yet that of the update. Change gradients by a "
                "linear Tensor.register_hook, weights by Recipe.after_update; or train in one "
                "process (backend cpu) with micro_batch equal to global_batch"
            )
        if parts or plan.precision.loss_scaling:
            for hook in hooks_of(parameter):
                _refuse_unless_linear(hook, name, parameter)


def sums_parts(plan: Plan, world: World) -> bool:
    """Return True if the gradient of an update is a sum over microbatches or feeders."""
    num_samples = (plan.micro_batch or plan.global_batch) * world.num_readers
    return world.num_feeders > 1 or num_samples < plan.global_batch


def _refuse_unless_linear(hook: Hook, name: str, parameter: Tensor) -> None:
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    is_meta = parameter.device.type == "meta"
    device = torch.device("cpu") if is_meta else parameter.device

    def change(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        (gradient,) = gradients
        made = hook(gradient)
        return [gradient if made is None else made]

    try:
        linear, why = is_linear(change, [Like(shape, parameter.dtype, device)]), NOT_LINEAR
    except Exception as error:  # the user's code, on a gradient that it may not expect
        linear, why = False, f"it cannot be tried on a gradient ({type(error).__name__}: {error})"
    if not linear:
        raise RecipeError(
            f"{describe_hook(hook)} is registered on parameter {name!r} by Tensor.register_hook, "
            f"and {why}. Each rank calls it with the gradient of its own microbatch, and the "
            "results are added up, so it would train on other numbers than one process. A hook may "
            "scale or mask a gradient. To clip, set max_grad_norm or max_grad_value; or train in "
            "one process (backend cpu) with micro_batch equal to global_batch"
        )


def describe_hook(hook: Any) -> str:
    """Return the words for a hook in a message."""
    return f"the hook {getattr(hook, '__qualname__', None) or type(hook).__name__!r}"

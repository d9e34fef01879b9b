"""Modules whose weights are not in memory yet, or are stood in for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ...kernel.errors import RecipeError
from ..common import attached


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are built lose the memory of each parameter at once; their buffers keep it,
    since what a constructor computes into a buffer can be had nowhere else.
    """

    def drop(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            return None  # which keeps it, so that tied ones stay tied
        dropped = attached.in_place_of(parameter, parameter.detach().to("meta"))
        attached.carry_hooks(parameter, dropped)
        return dropped

    handle = register_module_parameter_registration_hook(cast(Any, drop))
    try:
        yield
    finally:
        handle.remove()


def materialise(module: nn.Module, device: torch.device) -> None:
    """Allocate memory on `device`, uninitialised, for parameters on the meta device."""
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise RecipeError(
                f"recipe.model built buffer {name!r} on the meta device, where its values are "
                "lost; build on the CPU, and set backend.meta=true to hold no weights"
            )
    replace(
        module,
        {
            parameter: nn.Parameter(
                torch.empty_like(parameter, device=device), parameter.requires_grad
            )
            for parameter in module.parameters()
            if parameter.is_meta
        },
    )


@torch.no_grad()
def take_from_rank_0(module: nn.Module) -> None:
    """Give all ranks the weights and buffers of rank 0, in host memory."""
    materialise(module, torch.device("cpu"))
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor, src=0)


def replace(
    module: nn.Module, new: Mapping[nn.Parameter, nn.Parameter], recurse: bool = True
) -> None:
    """Replace parameters by the new ones, tied parameters in all of their places."""
    for part in module.modules() if recurse else (module,):
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter in new:
                part._parameters[name] = new[parameter]


@contextmanager
def replaced(
    module: nn.Module, new: Mapping[nn.Parameter, nn.Parameter], recurse: bool = True
) -> Iterator[None]:
    """Replace parameters within the block."""
    replace(module, new, recurse)
    try:
        yield
    finally:
        replace(module, {other: own for own, other in new.items()}, recurse)


def initialise(
    module: nn.Module, seed: int, keep: Callable[[nn.Parameter, Tensor], None]
) -> list[str]:
    """Fresh weights, whole, for one submodule at a time and in host memory: `keep(parameter,
    whole)` takes from them. The names of parameters that nothing initialises are returned.

    By the `_init_weights(submodule)` of the module, if it has that, as transformers' models do;
    else by `reset_parameters()` of each submodule, as torch's do. The same on all ranks.
    """
    init: Callable[[Any], None] | None = getattr(module, "_init_weights", None)
    missing: list[str] = []
    seen: set[nn.Parameter] = set()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, part in module.named_modules():
            own = dict(part.named_parameters(recurse=False))
            fresh = {p: nn.Parameter(torch.empty(p.shape, dtype=p.dtype)) for p in own.values()}
            with replaced(part, fresh, recurse=False):
                if init is not None and own:
                    init(part)
                elif own and hasattr(part, "reset_parameters"):
                    part.reset_parameters()
                elif any(parameter not in seen for parameter in own.values()):
                    missing += [f"{name}.{key}".lstrip(".") for key in own]
            for parameter, whole in fresh.items():
                if parameter not in seen:  # of tied weights the first counts
                    seen.add(parameter)
                    keep(parameter, whole.detach())
    return missing


def fill(module: nn.Module, seed: int, take: Callable[[str, nn.Parameter, Tensor], None]) -> None:
    """`initialise` by name: `take(name, parameter, whole)`. Raises `RecipeError` for parameters
    that nothing initialises."""
    names = {parameter: name for name, parameter in module.named_parameters()}

    def keep(parameter: nn.Parameter, whole: Tensor) -> None:
        take(names[parameter], parameter, whole)

    if missing := initialise(module, seed, keep):
        raise RecipeError(
            f"backend.meta is true and nothing initialises {', '.join(missing)}: give their "
            "modules reset_parameters(), resume from a checkpoint, or set backend.meta=false"
        )

"""Modules whose weights are not in memory yet, or are stood in for, or that a library wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ...kernel.errors import RecipeError

_NOTES = "__composable_api"
"""The attribute in which `torch.distributed._composable` keeps its state of a module."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are built lose the memory of each parameter at once; their buffers keep it,
    since what a constructor computes into a buffer can be had nowhere else.
    """

    def drop(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            return None  # which keeps it, so that tied ones stay tied
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(cast(Any, drop))
    try:
        yield
    finally:
        handle.remove()


def materialise(module: nn.Module, device: torch.device) -> None:
    """Memory on `device` for what is on the meta device, with whatever is in it."""
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
    """All weights and buffers, into memory of the host."""
    materialise(module, torch.device("cpu"))
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor, src=0)


def replace(
    module: nn.Module, new: Mapping[nn.Parameter, nn.Parameter], recurse: bool = True
) -> None:
    """Other parameters in the places of these, tied ones in all of theirs."""
    for part in module.modules() if recurse else (module,):
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter in new:
                part._parameters[name] = new[parameter]


@contextmanager
def replaced(
    module: nn.Module, new: Mapping[nn.Parameter, nn.Parameter], recurse: bool = True
) -> Iterator[None]:
    """`replace`, and back."""
    replace(module, new, recurse)
    try:
        yield
    finally:
        replace(module, {there: here for here, there in new.items()}, recurse)


@contextmanager
def unwrapped(module: nn.Module, wrapper: type, hooks_of: tuple[str, ...]) -> Iterator[None]:
    """The user's own classes and hooks alone, which can be copied: without the class that a
    library mixed into them and the notes that it left on them, and without forward hooks that are
    defined in the Python modules `hooks_of`.
    """
    parts = list(module.modules())
    classes = [type(part) for part in parts]
    registries: list[Any] = [
        hooks for part in parts for hooks in (part._forward_pre_hooks, part._forward_hooks)
    ]
    before = [dict(hooks) for hooks in registries]
    notes = [
        {name: part.__dict__.pop(name) for name in [*part.__dict__] if name.startswith(_NOTES)}
        for part in parts
    ]
    for part in parts:
        if isinstance(part, wrapper):
            own = next(c for c in type(part).__mro__ if not issubclass(c, wrapper))
            part.__class__ = cast(type[nn.Module], own)
    for hooks in registries:
        for key, hook in list(hooks.items()):
            if str(getattr(hook, "__module__", "")).startswith(hooks_of):
                del hooks[key]
    try:
        yield
    finally:
        for part, own, noted in zip(parts, classes, notes, strict=True):
            part.__class__ = own
            part.__dict__.update(noted)
        for hooks, kept in zip(registries, before, strict=True):
            hooks.clear()
            hooks.update(kept)


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

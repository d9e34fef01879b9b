"""Activation (gradient) checkpointing, by the model's own switch or around its repeated layers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["enable_recompute"]

_SWITCHES = ("activation_checkpointing_enable", "gradient_checkpointing_enable")


def enable_recompute(model: nn.Module, kwargs: Mapping[str, Any] | None = None) -> None:
    """Recompute the model's activations in backward instead of keeping them.

    `kwargs`: `every_n_layers` (1: every layer), `offload` (keep the inputs of recomputation on the
    host), and arguments of `torch.utils.checkpoint.checkpoint`. A model with its own method for it
    uses that; in other models the members of the outermost `nn.ModuleList`s and `nn.Sequential`s
    are wrapped. Raises ValueError for a model that has neither, or whose method does not support
    the arguments.
    """
    options = dict(kwargs or {})
    every_n_layers = int(options.pop("every_n_layers", 1))
    offload = bool(options.pop("offload", False))
    for name in _SWITCHES:
        if hasattr(model, name):
            return _switch(model, name, options, every_n_layers, offload)
    layers = list(_repeated_layers(model))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no activation_checkpointing_enable(), and no repeated"
            " layers (nn.ModuleList, nn.Sequential) that could be recomputed one by one; give it"
            " the method, or set activation_checkpointing=False"
        )
    for layer in layers[::every_n_layers]:
        layer.forward = partial(_recomputed, layer, layer.forward, offload, options)
    return None


def _switch(
    model: nn.Module, name: str, options: dict[str, Any], every_n_layers: int, offload: bool
) -> None:
    switch: Callable[..., None] = getattr(model, name)
    parameters = inspect.signature(switch).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    asked = {
        name.replace("enable", "kwargs"): (options or None, None),
        "every_n_layers": (every_n_layers, 1),
        "offload": (offload, False),
    }
    given = {}
    for key, (value, default) in asked.items():
        if key in parameters or takes_all:
            given[key] = value
        elif value != default:
            raise ValueError(
                f"{type(model).__name__}.{name} does not take {key}, which"
                f" activation_checkpointing_kwargs sets to {value!r}"
            )
    switch(**given)


def _repeated_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Return the members with weights of the outermost lists of modules."""
    for child in module.children() if not isinstance(module, _LISTS) else [module]:
        if isinstance(child, _LISTS):
            yield from (layer for layer in child if any(True for _ in layer.parameters()))
        else:
            yield from _repeated_layers(child)


_LISTS = (nn.ModuleList, nn.Sequential)


def _recomputed(
    layer: nn.Module,
    forward: Callable[..., Any],
    offload: bool,
    options: Mapping[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not (layer.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    pinned = torch.accelerator.is_available()
    on_host = torch.autograd.graph.save_on_cpu(pinned) if offload else contextlib.nullcontext()
    with on_host:
        return checkpoint(forward, *args, **{"use_reentrant": False, **options}, **kwargs)

"""The user's own module, as it was before DeepSpeed wrapped it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..common import attached
from ..common.unwrapping import unwrap, unwrapped

__all__ = ["LIBRARIES", "OriginalModule", "without_hooks"]

LIBRARIES = ("deepspeed",)
"""Python modules whose hooks are no user's."""
_NOTES = ("ds_", "_ds_", "_external_params", "_n_posted_fwd")


class OriginalModule:
    """The attributes and hooks of a module's parameters, and its forward."""

    def __init__(self, module: nn.Module) -> None:
        """Create it before an engine of DeepSpeed is built over the module."""
        self.module = module
        named = dict(module.named_parameters())
        self._attributes = {name: attached.attributes_of(p) for name, p in named.items()}
        self._hooks = {name: attached.hooks_of(p) for name, p in named.items()}
        self._own = {name: _own_of(p) for name, p in named.items()}
        self._known: dict[nn.Module, dict[str, Any]] = {
            part: {**dict.fromkeys(vars(part)), "forward": vars(part).get("forward")}
            for part in module.modules()
        }

    def whole(self) -> dict[Tensor, nn.Parameter]:
        """Copy all parameters, whole, to host memory, each by the one that it stands for. Called by
        all ranks."""
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        made: dict[Tensor, nn.Parameter] = {}
        for name, parameter in self.module.named_parameters():
            is_partitioned = hasattr(parameter, "ds_id")
            with GatheredParameters([parameter]), torch.no_grad():
                data = parameter.detach().to("cpu", copy=True)
            if not is_partitioned:  # an optimizer of the user's may hold it
                made[parameter] = _given_back(parameter, data, *self._own.get(name, _own_of(data)))
                continue
            made[parameter] = nn.Parameter(data, parameter.requires_grad)
            attached.set_attributes(made[parameter], self._attributes.get(name, {}))
            for hook in self._hooks.get(name, ()) if parameter.requires_grad else ():
                made[parameter].register_hook(hook)  # type: ignore[no-untyped-call]
        return made

    def give_back(self, whole: Mapping[Tensor, nn.Parameter]) -> None:
        """Put these parameters into the module, and remove what the engine has left in it. Called
        after the engine is destroyed."""
        for part in self.module.modules():
            own: dict[str, Any] = dict(part._parameters)
            part._parameters = {n: p if p is None else whole[p] for n, p in own.items()}
            known = self._known.get(part, {})
            for name in vars(part).keys() - known.keys():
                if name.startswith(_NOTES):
                    del vars(part)[name]
            vars(part).pop("forward", None)
            if (forward := known.get("forward")) is not None:
                part.forward = forward
        for buffer in self.module.buffers():
            buffer.data = buffer.data.cpu()
        unwrap(self.module, LIBRARIES)


@contextmanager
def without_hooks(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Remove DeepSpeed's hooks, which fetch and free weights with all ranks, in the block, and let
    the module have this forward."""
    before, module.forward = module.forward, forward
    try:
        with unwrapped(module, LIBRARIES):
            yield
    finally:
        module.forward = before


def _own_of(parameter: Tensor) -> tuple[set[str], set[int]]:
    """Return the names of its attributes and the keys of its hooks."""
    return {*vars(parameter)}, {*(parameter._backward_hooks or {})}


def _given_back(
    parameter: nn.Parameter, data: Tensor, attributes: set[str], hooks: set[int]
) -> nn.Parameter:
    """The same parameter with these elements, and of attributes and hooks these alone."""
    parameter.data = data
    for name in vars(parameter).keys() - attributes:
        delattr(parameter, name)
    registered: dict[int, Any] = parameter._backward_hooks or {}
    for key in registered.keys() - hooks:
        del registered[key]
    return parameter

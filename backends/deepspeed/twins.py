"""Probe a small twin of an optimizer: can ZeRO shard it, and which state does it begin with?"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.optimizer_entries import beside_state
from ...kernel.errors import CapabilityRefused
from ..common import models

__all__ = [
    "first_update_differs",
    "fresh_state",
    "is_count",
    "refuse_if_it_counts_steps",
    "refuse_unless_elementwise",
]


def refuse_unless_elementwise(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Raises `CapabilityRefused` for an optimizer to which more than each element matters.

    ZeRO gives that of each rank a stretch of a flat tensor, so an Adafactor, or one that sums over
    all parameters as Prodigy does, would silently become another algorithm. It is tried on a matrix
    and, twice, on stretches of the same numbers.
    """
    kinds = models.kinds_of(optimizer)
    if any(isinstance(k, torch.optim.Adagrad) for k in kinds) and len(optimizer.param_groups) > 1:
        raise CapabilityRefused(
            "Adagrad with more than one group of parameters",
            "deepspeed",
            "DeepSpeed builds it again with the settings of one; put all parameters into one group",
        )
    for kind in kinds:
        if names := beside_state(kind):
            raise CapabilityRefused(
                f"the optimizer {type(kind).__name__}",
                "deepspeed",
                f"its state_dict() has {', '.join(names)} beside state and groups, which ZeRO does "
                "not keep. Take one that keeps its state by parameter, or the backend fsdp or ddp",
            )
        _refuse_unless_elementwise(kind, device)


def _refuse_unless_elementwise(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    reason = "it updates a matrix differently from the same numbers in parts, each by itself"
    numbers = torch.linspace(-1.0, 2.0, 24)
    try:
        whole = _tried(optimizer, device, numbers.reshape(4, 6))
        cut = torch.cat([_tried(optimizer, device, part) for part in (numbers[:10], numbers[10:])])
        same = torch.allclose(whole, cut, rtol=1e-4, atol=1e-6)
        if not same and not torch.equal(whole, _tried(optimizer, device, numbers.reshape(4, 6))):
            reason = f"it draws random numbers: {reason}"
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError) as error:
        same, reason = False, f"it fails on flat tensors ({error})"
    if not same:
        raise CapabilityRefused(
            f"the optimizer {type(optimizer).__name__}",
            "deepspeed",
            f"{reason}, which is what ZeRO shards. Take an optimizer like torch.optim.AdamW or "
            "SGD, or the backend fsdp or ddp",
        )


def _tried(optimizer: torch.optim.Optimizer, device: torch.device, numbers: Tensor) -> Tensor:
    """These numbers after two updates, with gradients that follow from them."""
    parameter = nn.Parameter(numbers.to(device, copy=True))
    twin = _twin(optimizer, [parameter])
    for turn in (1.0, 2.0):
        parameter.grad = (numbers * -turn + turn).to(device)
        twin.step()
    return parameter.detach().reshape(-1)


def _twin(
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    group: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """One of the same kind that has not stepped, with the settings of that group, or of its first
    one and a learning rate that shows."""
    given = {**optimizer.param_groups[0], "lr": 0.1} if group is None else group
    settings = copy.deepcopy({key: value for key, value in given.items() if key != "params"})
    if type(optimizer) is torch.optim.Adagrad:  # in torch 2.8 its state is made when it is
        return torch.optim.Adagrad(parameters, **settings)
    twin = object.__new__(type(optimizer))
    groups = [{**settings, "params": parameters}]
    twin.__dict__.update(vars(optimizer), state=defaultdict(dict), param_groups=groups)
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return twin


def refuse_if_it_counts_steps(optimizer: torch.optim.Optimizer) -> None:
    """Raise `CapabilityRefused` for an optimizer that counts its steps in its groups. To be called
    where ZeRO calls it several times a step, each time with all groups."""
    for kind in models.kinds_of(optimizer):
        _refuse_if_it_counts_steps(kind)


def _refuse_if_it_counts_steps(optimizer: torch.optim.Optimizer) -> None:
    twin = _twin(optimizer, [])
    before = {**twin.param_groups[0]}
    twin.step()
    if changed := [key for key, value in twin.param_groups[0].items() if value != before.get(key)]:
        raise CapabilityRefused(
            f"the optimizer {type(optimizer).__name__}",
            "deepspeed",
            f"it counts {', '.join(changed)} in its groups, and stage 3 calls it once for each "
            "group of weights. Take one group, backend.stage=2, or the backend fsdp or ddp",
        )


def fresh_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], weights: Tensor
) -> dict[str, Tensor]:
    """Return the entries with a value an element that this optimizer begins with for `weights`, by
    key; those that are left out begin as zeros. A step shows them that has a gradient of zero and
    no decay: none of them moves in it. `group`: the settings, an entry of `param_groups`."""
    kind = models.kind_of(optimizer, group)
    if type(kind).__module__.startswith("deepspeed."):
        return {}  # zeros in all of its optimizers, and a twin would count in their compiled parts
    parameter = nn.Parameter(weights.detach().clone())
    twin = _twin(kind, [parameter], {**group, "weight_decay": 0.0})
    parameter.grad = torch.zeros_like(parameter)
    twin.step()
    found: Mapping[str, Any] = twin.state[parameter]
    return {k: v for k, v in found.items() if isinstance(v, Tensor) and v.shape == weights.shape}


def first_update_differs(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], device: torch.device
) -> bool:
    """True if the optimizer's first update of a weight, by the settings of that group, is unlike
    that from `fresh_state`, as with SGD's dampening, which the first update leaves out."""
    kind = models.kind_of(optimizer, group)
    numbers = torch.linspace(-1.0, 2.0, 8, device=device)
    if type(kind).__module__.startswith("deepspeed."):
        return False
    found = []
    for begun in (False, True):
        parameter = nn.Parameter(numbers.clone())
        twin = _twin(kind, [parameter], {**group, "lr": 0.1, "weight_decay": 0.0})
        if begun:
            parameter.grad = torch.zeros_like(parameter)
            twin.step()
            parameter.data.copy_(numbers)
            state: dict[str, Any] = twin.state[parameter]
            counts = {key: value * 0 for key, value in state.items() if is_count(value)}
            if counts.keys() - {"step"}:
                return False  # a group's, and need not begin at zero: see `UpdatedParameters`
            state.update(counts)
        parameter.grad = 1.0 - numbers
        twin.step()
        found.append(parameter.detach())
    return not torch.allclose(found[0], found[1], rtol=1e-4, atol=1e-6)


def is_count(value: Any) -> bool:
    """True for an entry of an optimizer's state that is one number for all elements."""
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and not value.dim())

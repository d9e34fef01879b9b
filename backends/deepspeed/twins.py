"""Probe a small twin of an optimizer: can ZeRO shard it, and which state does it begin with?"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.optimizer_entries import beside_state
from ...data.nested import tensors_of
from ...data.operations import replacing_operations
from ...kernel.errors import CapabilityRefused
from ..common import models
from ..common.optimizer_step import draws_nothing
from ..common.update_random import drawing_apart

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


def _constant_draws(sizes: set[int]) -> AbstractContextManager[Any]:
    """Give a constant in place of each random number that torch draws within the block. `sizes`
    receives the numbers of elements that are drawn at once. Raises `LibraryUnsupported` if this
    torch cannot show its operations."""

    def run(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            for drawn in tensors_of(made):
                sizes.add(drawn.numel())
                drawn.fill_(0.3 if drawn.is_floating_point() else 1)
        return made

    return replacing_operations(run, "trying an optimizer that draws random numbers")


_NUMBERS = torch.linspace(-1.0, 2.0, 24)
_PARTS = _NUMBERS[:10], _NUMBERS[10:]


def _refuse_unless_elementwise(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    reason = "it updates a matrix differently from the same numbers in parts, each by itself"
    try:
        with drawing_apart(optimizer, device):
            same = _is_elementwise(optimizer, device)
            if not same and not torch.equal(_whole(optimizer, device), _whole(optimizer, device)):
                reason = f"it draws random numbers, and not one by torch for each element: {reason}"
                sizes: set[int] = set()
                with _constant_draws(sizes):
                    same = _is_elementwise(optimizer, device)
                same = same and sizes <= {each.numel() for each in (_NUMBERS, *_PARTS)}
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError) as error:
        same, reason = False, f"it fails on flat tensors ({error})"
    if not same:
        raise CapabilityRefused(
            f"the optimizer {type(optimizer).__name__}",
            "deepspeed",
            f"{reason}, which is what ZeRO shards. Take an optimizer like torch.optim.AdamW or "
            "SGD, or the backend fsdp or ddp",
        )


def _is_elementwise(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    joined = torch.cat([_tried(optimizer, device, part) for part in _PARTS])
    return torch.allclose(_whole(optimizer, device), joined, rtol=1e-4, atol=1e-6)


def _whole(optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor:
    return _tried(optimizer, device, _NUMBERS.reshape(4, 6))


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
    with drawing_apart(optimizer, torch.device("cpu")):
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
    with drawing_apart(kind, weights.device):
        twin.step()
    found: Mapping[str, Any] = twin.state[parameter]
    return {k: v for k, v in found.items() if isinstance(v, Tensor) and v.shape == weights.shape}


def first_update_differs(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], device: torch.device
) -> bool:
    """True if the optimizer's first update of a weight, by the settings of that group, is unlike
    that from `fresh_state`, as with SGD's dampening, which the first update leaves out."""
    kind = models.kind_of(optimizer, group)
    if type(kind).__module__.startswith("deepspeed."):
        return False
    with drawing_apart(kind, device):
        if not _first_differs(kind, group, device):
            return False
        if draws_nothing(kind):
            return True
        with _constant_draws(set()):  # or else what it has drawn may be all that differs
            return _first_differs(kind, group, device)


def _first_differs(
    kind: torch.optim.Optimizer, group: Mapping[str, Any], device: torch.device
) -> bool:
    numbers = torch.linspace(-1.0, 2.0, 8, device=device)
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

"""What a checkpoint holds of an optimizer, under the names that all drivers share.

`<fqn>/<key>`
    An entry of a parameter's state: a tensor, at least float32.
`<fqn>/group.<key>`
    One of the parameter group that begins with this parameter: what the optimizer itself has
    changed there since it was built (a count of steps, an estimate), all but `lr`, which is the
    kernel's.
`<fqn>/average`
    No state: an average of the weight (see `averages`).

What is no tensor says in its name what it was: `<key>:int`, `:float` and `:bool` are 0-d (float64,
or int64 where that is not exact), `:none` is a 0, and `:list` and `:tuple` hold a length; their
items are `<key>.0`, `<key>.1` and so on.

Drivers use `OptimizerState`, or its parts where the library keeps the state in another shape.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.optimizer_entries import (
    AVERAGE,
    GROUP,
    can_be_stored,
    copied,
    flat,
    is_state,
    nested,
    same,
)
from ...kernel.errors import CheckpointDamaged, CheckpointMismatch
from ...kernel.shards import Reader
from . import models
from .averages import Averages

__all__ = [
    "GroupNumbers",
    "OptimizerState",
    "Stored",
    "check",
]

_GIVEN = ("params", "lr", "initial_lr", "capturable", "differentiable", "foreach", "fused")
"""Entries of a group that are not the optimizer's to count in."""


# --- what is counted in groups ----------------------------------------------------------------


class GroupNumbers:
    """The numbers that an optimizer keeps in its parameter groups. Create it right after the
    optimizer: only entries that change from then on are the optimizer's own; all others are the
    recipe's.

    `names`: the FQNs of each group's parameters.
    """

    def __init__(
        self, names: Sequence[Sequence[str | None]], groups: Iterable[dict[str, Any]]
    ) -> None:
        self.names = [[name for name in of_group if name is not None] for of_group in names]
        self._built = [copied(_counted(group)) for group in groups]

    def tensors(self, groups: Iterable[dict[str, Any]]) -> dict[str, Tensor]:
        """As stored."""
        return {
            f"{names[0]}/{name}": tensor
            for names, built, group in zip(self.names, self._built, groups, strict=True)
            if names
            for key, value in _counted(group).items()
            if key not in built or not same(value, built[key])
            for name, tensor in flat(GROUP + key, value)
        }

    def read(self, reader: Reader) -> list[dict[str, Any]]:
        """For each group what was stored with one of its parameters; of a group that has none of
        those what all stored groups agree on. Raises `CheckpointMismatch` where groups that are
        one now had counted differently, and `CheckpointDamaged`; changes nothing."""
        stored: dict[str, dict[str, Tensor]] = {}
        for name in reader.names("optimizer"):
            fqn, _, key = name.rpartition("/")
            if key.startswith(GROUP):
                stored.setdefault(fqn, {})[key] = reader.read("optimizer", name)
        read = {fqn: nested(entries, f"{fqn}/") for fqn, entries in stored.items()}
        return [self._one({n: read[n] for n in names if n in read} or read) for names in self.names]

    def _one(self, stored: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for fqn, entries in stored.items():
            for key, value in entries.items():
                if not same(merged.setdefault(key, value), value):
                    raise CheckpointMismatch(
                        f"the optimizer's {key.removeprefix(GROUP)!r} was {merged[key]} in one "
                        f"group of parameters and {value} in that of {fqn!r}, and they are one "
                        "group now: group parameters as the run that wrote the checkpoint did"
                    )
        return {key.removeprefix(GROUP): value for key, value in merged.items()}

    def load(
        self, groups: Iterable[dict[str, Any]], stored: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """Restore the groups' numbers to those that were read; without them, to those at
        construction."""
        read = list(stored) or [{} for _ in self._built]
        for group, built, values in zip(groups, self._built, read, strict=True):
            for key in _counted(group).keys() - built.keys():
                del group[key]
            group.update(copied(built))
            group.update({key: _placed(value, built.get(key)) for key, value in values.items()})


def _counted(group: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in group.items() if key not in _GIVEN}
    return {key: value for key, value in kept.items() if can_be_stored(value)}


def _placed(value: Any, like: Any) -> Any:
    if isinstance(value, Tensor) and isinstance(like, Tensor):
        return value.to(like.device, like.dtype)
    return value


# --- whether it is this optimizer's -----------------------------------------------------------


def check(
    reader: Reader,
    optimizer: torch.optim.Optimizer,
    names: Sequence[Sequence[str | None]],
    shapes: Mapping[str, Sequence[int]],
) -> None:
    """Raises `CheckpointMismatch` for state of another model or optimizer, and `CheckpointDamaged`
    for an entry that is missing or malformed; looks at names, dtypes and shapes only.

    `names`: of the parameters in each group of `optimizer`. `shapes`: of all of the model's. What
    an optimizer keeps is known of torch's own alone, which are tried on a small parameter.
    """
    stored: dict[str, dict[str, str]] = {}
    for name in reader.names("optimizer"):
        fqn, _, key = name.rpartition("/")
        if fqn not in shapes:
            raise CheckpointMismatch(
                f"the checkpoint holds optimizer state {key!r} of {fqn!r}, which is no parameter "
                "of this model"
            )
        if key == AVERAGE:
            like = torch.empty(tuple(range(2, 2 + len(shapes[fqn]))), device="meta")
            _compare_entry(reader, name, like, tuple(shapes[fqn]))
        elif is_state(key):
            stored.setdefault(fqn, {})[key.partition(":")[0]] = name
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        present = [name for name in of_group if name is not None and name in stored]
        for dims in sorted({len(shapes[name]) for name in present}):
            alike = {n: stored[n] for n in present if len(shapes[n]) == dims}
            kind = models.kind_of(optimizer, group)
            if (kept := _kept_by(kind, group, dims)) is not None:
                _compare_keys(kind, alike, kept)
                for fqn, entries in alike.items():
                    for key, name in entries.items():
                        _compare_entry(reader, name, kept[key], tuple(shapes[fqn]))


def _kept_by(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dims: int
) -> dict[str, Tensor] | None:
    """Key -> what one of torch's optimizers keeps of a parameter of so many dimensions (of sizes 2,
    3, ...) after two updates; None for others."""
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind:
        return None
    plain = {"lr": 1e-3, "capturable": False, "differentiable": False, "foreach": False}
    settings = {key: plain.get(key, value) for key, value in group.items() if key != "fused"}
    tried = nn.Parameter(torch.zeros(tuple(range(2, 2 + dims))))
    try:
        twin = kind([{**settings, "params": [tried]}])
        for _ in range(2):
            tried.grad = torch.ones_like(tried)
            twin.step()
    except (TypeError, ValueError, RuntimeError):  # it wants a closure, or sparse gradients
        return None
    return {
        name.partition(":")[0]: tensor
        for key, value in twin.state[tried].items()
        for name, tensor in flat(key, value)
    }


def _compare_keys(
    optimizer: torch.optim.Optimizer,
    stored: Mapping[str, Mapping[str, str]],
    kept: Mapping[str, Tensor],
) -> None:
    there = {key for entries in stored.values() for key in entries}
    if there != kept.keys():
        raise CheckpointMismatch(
            f"the checkpoint's optimizer kept {_listed(there)} of each parameter, and this "
            f"{type(optimizer).__name__} keeps {_listed(kept)}: it was another one, or had other "
            "options. Take that one, or start this one anew with resume.optimizer=fresh"
        )
    for fqn, entries in stored.items():
        for key in sorted(kept.keys() - entries.keys()):
            raise CheckpointDamaged(f"optimizer {f'{fqn}/{key}'!r} is missing in the checkpoint")


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"


def _compare_entry(reader: Reader, name: str, kept: Tensor, shape: tuple[int, ...]) -> None:
    info, like_parameter = reader.info("optimizer", name), tuple(range(2, 2 + len(shape)))
    wanted = shape if kept.dim() and tuple(kept.shape) == like_parameter else None
    wanted = () if not kept.dim() else wanted
    if wanted is not None and info.shape != wanted:
        raise CheckpointDamaged(
            f"optimizer {name!r} has shape {info.shape} in the checkpoint, and must have {wanted}"
        )
    if info.dtype.is_floating_point != kept.dtype.is_floating_point:
        raise CheckpointDamaged(f"optimizer {name!r} is of {info.dtype} in the checkpoint")


# --- the whole --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """Entries that were read, by the parameter's number among those of all groups, and each group's
    counts."""

    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    averages: dict[str, Tensor] = field(default_factory=dict)


class OptimizerState:
    """The state of a `torch.optim.Optimizer` over parameters of a module, and averages of these.
    Create it right after the optimizer: a checkpoint without optimizer state resets the optimizer
    to this state."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: nn.Module,
        averages: Averages | None = None,
    ) -> None:
        names = {parameter: name for name, parameter in module.named_parameters()}
        self.optimizer = optimizer
        self.parameters = {name: parameter for parameter, name in names.items()}
        self.shapes = {name: tuple(parameter.shape) for parameter, name in names.items()}
        self.names = [[names.get(p) for p in g["params"]] for g in optimizer.param_groups]
        self.numbers = GroupNumbers(self.names, optimizer.param_groups)
        self.averages = averages or Averages()
        self.elsewhere: Collection[str] = ()
        """FQNs of parameters whose state is another rank's matter."""
        self._built = {index: copied(state) for index, _, state in self._states()}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters of all groups that have their state here, by FQN."""
        names = (name for of_group in self.names for name in of_group)
        here = (name for name in names if name is not None and name not in self.elsewhere)
        return {name: self.parameters[name] for name in here}

    def tensors(self) -> dict[str, Tensor]:
        """Everything, as stored."""
        entries = {
            f"{name}/{key}": tensor
            for _, name, state in self._states()
            for entry, value in state.items()
            for key, tensor in flat(entry, value)
        }
        counted = self.numbers.tensors(self.optimizer.param_groups)
        return entries | counted | self.averages.tensors()

    def read(
        self,
        reader: Reader,
        read: Callable[[Reader, str, nn.Parameter], Tensor] | None = None,
    ) -> Stored:
        """Read this optimizer's state from a checkpoint; changes nothing. `read(reader, name,
        parameter)` reads the part of an entry that this rank needs; by default all of it. Raises as
        `check` does."""
        check(reader, self.optimizer, self.names, self.shapes)
        entries: dict[str, dict[str, Tensor]] = {}
        averages: dict[str, Tensor] = {}
        trained = self.trained
        for name in reader.names("optimizer"):
            fqn, _, key = name.rpartition("/")
            if fqn in trained and not key.startswith(GROUP):
                tensor = read(reader, name, trained[fqn]) if read else None
                tensor = reader.read("optimizer", name) if tensor is None else tensor
                if key == AVERAGE:
                    averages[fqn] = tensor.to(trained[fqn].device)
                else:
                    entries.setdefault(fqn, {})[key] = tensor
        order = enumerate(name for of_group in self.names for name in of_group)
        states = {i: nested(entries[n], f"{n}/") for i, n in order if n in entries}
        return Stored(states, self.numbers.read(reader), averages)

    def load(self, stored: Stored) -> None:
        """Load the state through the optimizer's own `load_state_dict`, which places and casts each
        entry. The hyper-parameters stay those of the recipe."""
        packed = self.optimizer.state_dict()
        order = [name for of_group in self.names for name in of_group]
        foreign = {
            key: state
            for key, state in packed["state"].items()
            if not isinstance(key, int) or order[key] is None
        }
        if stored.states or packed["state"]:
            packed["state"] = foreign | copied(self._built) | stored.states
            self.optimizer.load_state_dict(packed)
        self.numbers.load(self.optimizer.param_groups, stored.groups)
        self.averages.of = dict(stored.averages)

    def _states(self) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
        """Yields number, name and state of each parameter that has a state."""
        states = self.optimizer.state
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        names = (name for of_group in self.names for name in of_group)
        for index, (parameter, name) in enumerate(zip(parameters, names, strict=True)):
            if name is not None and parameter in states:
                yield index, name, states[parameter]

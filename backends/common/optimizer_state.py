"""Optimizer state in a checkpoint, under the names that all drivers share.

`<fqn>/<key>`
    An entry of a parameter's state: a tensor, at least float32. `<key>:<dtype>` had another dtype
    than the parameter.
`<fqn>/group.<key>`
    An entry of the parameter group that begins with this parameter: what the optimizer itself has
    changed in the group since it was built (a count of steps, an estimate), all but `lr`, which is
    the kernel's.
`<fqn>/extra.<key>`
    What a `state_dict` of the optimizer's own holds beside state and groups; the parameter is the
    first of all groups.
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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.optimizer_entries import (
    AVERAGE,
    EXTRA,
    GROUP,
    beside_state,
    can_be_stored,
    copied,
    flat,
    nested,
    same,
)
from ...data.nested import map_tensors
from ...kernel.errors import CheckpointMismatch, RecipeError
from ...kernel.shards import Reader
from .averages import Averages
from .optimizer_check import check

__all__ = [
    "GroupNumbers",
    "OptimizerState",
    "Stored",
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

    def renamed(
        self, names: Sequence[Sequence[str | None]], groups: Sequence[dict[str, Any]]
    ) -> None:
        """Take over other names, and groups that were added since."""
        self.names = [[name for name in of_group if name is not None] for of_group in names]
        self._built += [copied(_counted(group)) for group in groups[len(self._built) :]]

    def tensors(self, groups: Iterable[dict[str, Any]]) -> dict[str, Tensor]:
        """Return the numbers of these groups as a checkpoint stores them."""
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


# --- the whole --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """Entries that were read, by the parameter's number among those of all groups, and each group's
    counts."""

    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    beside: dict[str, Any] = field(default_factory=dict)
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
        self.optimizer, self.module = optimizer, module
        self._names_of = {p: name for name, p in module.named_parameters()}
        self.names = self._names()
        self.numbers = GroupNumbers(self.names, optimizer.param_groups)
        self.averages = averages or Averages()
        self.elsewhere: Collection[str] = ()
        """FQNs of parameters whose state is another rank's matter."""
        self._built = {index: copied(state) for index, _, state in self._states()}
        self._built_beside = copied(beside_state(optimizer))

    def _names(self) -> list[list[str | None]]:
        """Return the names of the parameters in each group."""
        named = self._names_of
        self.parameters = {name: parameter for parameter, name in named.items()}
        self.shapes = {name: tuple(parameter.shape) for parameter, name in named.items()}
        self._dtypes = {name: parameter.dtype for parameter, name in named.items()}
        return [[named.get(p) for p in g["params"]] for g in self.optimizer.param_groups]

    def look_again(self) -> None:
        """Take over the names that parameters have by now, and groups that were added. Raises
        `RecipeError` for parameters that others have replaced, which are still updated."""
        now = {p: name for name, p in self.module.named_parameters()}
        trained = (p for group in self.optimizer.param_groups for p in group["params"])
        if gone := [self._names_of[p] for p in trained if p in self._names_of and p not in now]:
            raise RecipeError(
                f"the model has other parameters in the places of {', '.join(gone[:10])} than when "
                "its optimizer was built, which still updates the old ones: the new ones do not "
                "learn. Change values in place (with torch.no_grad(): parameter.copy_(new)), or "
                "replace parameters in recipe.model"
            )
        self._names_of = now
        self.names = self._names()
        self.numbers.renamed(self.names, self.optimizer.param_groups)

    def follow_groups(self, driver: str) -> None:
        """Take over groups that were added since, on a driver that shows other parameters while a
        model computes. Raises `RecipeError` where a group holds such ones."""
        known = len(self.numbers.names)
        if len(groups := self.optimizer.param_groups) == known:
            return
        self.look_again()
        if any(None in names for names in self.names[known:]):
            raise RecipeError(
                f"a parameter of a group that was added to the optimizer (it has {len(groups)} by "
                f"now, and had {known}) is none of the model's as {driver} holds them between "
                "steps, so that it would not learn. Add groups right after a step (StepEnded; "
                "compat: on_step_end), of parameters that the model has then"
            )

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters of all groups that have their state here, by FQN."""
        names = (name for of_group in self.names for name in of_group)
        here = (name for name in names if name is not None and name not in self.elsewhere)
        return {name: self.parameters[name] for name in here}

    def tensors(self) -> dict[str, Tensor]:
        """Everything, as stored."""
        self.look_again()
        entries = {
            f"{name}/{key}": tensor
            for _, name, state in self._states()
            for entry, value in state.items()
            for key, tensor in flat(entry, value, self._dtypes[name])
        }
        first = next((n for of_group in self.names for n in of_group if n is not None), "")
        beside = {
            f"{first}/{name}": tensor
            for key, value in beside_state(self.optimizer).items()
            for name, tensor in flat(EXTRA + key, value)
        }
        counted = self.numbers.tensors(self.optimizer.param_groups)
        return entries | beside | counted | self.averages.tensors()

    def read(
        self,
        reader: Reader,
        read: Callable[[Reader, str, nn.Parameter], Tensor] | None = None,
    ) -> Stored:
        """Read this optimizer's state from a checkpoint; changes nothing. `read(reader, name,
        parameter)` reads the part of an entry that this rank needs; by default all of it. Raises as
        `check` does."""
        self.look_again()
        check(reader, self.optimizer, self.names, self.shapes)
        entries: dict[str, dict[str, Tensor]] = {}
        averages: dict[str, Tensor] = {}
        beside: dict[str, dict[str, Tensor]] = {}
        trained = self.trained
        for name in reader.names("optimizer"):
            fqn, _, key = name.rpartition("/")
            if key.startswith(EXTRA):
                entry = reader.read("optimizer", name)
                beside.setdefault(fqn, {})[key.removeprefix(EXTRA)] = entry
            elif fqn in trained and not key.startswith(GROUP):
                tensor = read(reader, name, trained[fqn]) if read else None
                tensor = reader.read("optimizer", name) if tensor is None else tensor
                if key == AVERAGE:
                    averages[fqn] = tensor.to(trained[fqn].device)
                    continue
                like = self._dtypes[fqn]
                has_own = ":" in key or key == "step" or not tensor.is_floating_point()
                if not has_own and like.is_floating_point:
                    tensor = tensor.to(like)
                entries.setdefault(fqn, {})[key] = tensor
        order = enumerate(name for of_group in self.names for name in of_group)
        states = {i: nested(entries[n], f"{n}/") for i, n in order if n in entries}
        # stages of a pipeline have written one each
        own = next((fqn for fqn in trained if fqn in beside), next(iter(beside), ""))
        kept = nested(beside[own], f"{own}/{EXTRA}") if beside else {}
        return Stored(states, self.numbers.read(reader), kept, averages)

    def load(self, stored: Stored) -> None:
        """Load the state through the optimizer's own `load_state_dict`, which places each entry.
        Entries keep their dtypes. The hyper-parameters stay those of the recipe."""
        packed = self.optimizer.state_dict()
        order = [name for of_group in self.names for name in of_group]
        foreign = {
            key: state
            for key, state in packed["state"].items()
            if not isinstance(key, int) or order[key] is None
        }
        if "state" not in packed:
            raise CheckpointMismatch(
                f"the state_dict() of {type(self.optimizer).__name__} has no 'state', so that it "
                "cannot be given the checkpoint's: start it fresh with resume.optimizer=fresh"
            )
        beside = copied(self._built_beside) | stored.beside
        packed |= beside
        if stored.states or packed["state"] or beside:
            states = self._laid_out(stored.states)
            packed["state"] = foreign | copied(self._built) | states
            self.optimizer.load_state_dict(packed)
            self._restore_dtypes(states)
        self.numbers.load(self.optimizer.param_groups, stored.groups)
        self.averages.of = dict(stored.averages)

    def _laid_out(self, stored: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """The states, with tensors of a parameter's shape in its memory order."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return {
            index: map_tensors(partial(_in_memory_order_of, parameters[index]), state)
            for index, state in stored.items()
        }

    def _restore_dtypes(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Undo the cast of entries to the dtype of their parameter, as torch's `load_state_dict`
        makes it."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, state in states.items():
            loaded = self.optimizer.state.get(parameters[index], {})
            for key, value in state.items():
                if key in loaded:
                    loaded[key] = _uncast(value, loaded[key])

    def _states(self) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
        """Yields number, name and state of each parameter that has a state."""
        states = self.optimizer.state
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        names = (name for of_group in self.names for name in of_group)
        for index, (parameter, name) in enumerate(zip(parameters, names, strict=True)):
            if name is not None and parameter in states:
                yield index, name, states[parameter]


def _uncast(value: Any, loaded: Any) -> Any:
    """Return what was loaded, with the dtypes of `value`, from which it was made."""
    if isinstance(value, Tensor) and isinstance(loaded, Tensor):
        was_cast = value.dtype != loaded.dtype and value.shape == loaded.shape
        return value.to(loaded.device) if was_cast else loaded
    pairs = isinstance(value, list | tuple) and isinstance(loaded, list | tuple)
    if pairs and type(value) is type(loaded) and len(value) == len(loaded):
        return type(value)(_uncast(a, b) for a, b in zip(value, loaded, strict=True))
    return loaded


def _in_memory_order_of(parameter: Tensor, tensor: Tensor) -> Tensor:
    """The tensor with the strides of a parameter of its shape, such as `channels_last`: fused
    kernels run through the memory of both in one order. Drivers that shard parameters have
    them contiguous."""
    if tensor.shape != parameter.shape or tensor.stride() == parameter.stride():
        return tensor
    ordered = torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device)
    return ordered.copy_(tensor)

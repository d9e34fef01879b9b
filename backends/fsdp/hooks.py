"""Carry the user's hooks over to the parameters that FSDP puts in the place of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...kernel.contract import World
from ...kernel.errors import RecipeError
from ...kernel.plan import Plan
from ..common import attached
from ..common.module_hooks import ModuleHooks
from ..common.writes import Writes
from . import wrap_units

__all__ = ["UserHooks", "watched_writes"]


class UserHooks:
    """Attributes and hooks of the parameters of a module that is about to be sharded, by FQN."""

    def __init__(self, module: nn.Module, plan: Plan, world: World) -> None:
        """Raises `RecipeError` for a hook that would not give the result of one process."""
        named = dict(module.named_parameters())
        attached.refuse_inexact_hooks(named, plan, world, takes_gradients=True)
        self._attributes = {name: attached.attributes_of(p) for name, p in named.items()}
        self.of_modules = ModuleHooks(module, plan, world)
        self._hooks = {name: found for name, p in named.items() if (found := attached.hooks_of(p))}

    def refuse_partitioned(self, module: nn.Module) -> None:
        """Raises `RecipeError` for a hook on a weight of partitioned layers or experts: no rank has
        the whole of such a gradient."""
        for name in self._hooks:
            if isinstance(module.get_parameter(name), DTensor):
                raise RecipeError(
                    f"a hook is registered on parameter {name!r} by Tensor.register_hook, and "
                    "recipe.parallel partitions this parameter over ranks, so that no rank has its "
                    "whole gradient. Take the hook away (a learning rate of its own may do the "
                    "same), leave the layer out of Parallel, or take the backend fsdp or ddp"
                )

    def stand_in(self, name: str, parameter: Tensor, whole: Tensor) -> nn.Parameter:
        """A parameter of the whole elements, with the same attributes and hooks."""
        made = attached.in_place_of(parameter, whole)
        for hook in self._hooks.get(name, ()) if made.requires_grad else ():
            made.register_hook(hook)  # type: ignore[no-untyped-call]
        return made

    def attach_to(self, module: nn.Module, units: Sequence[nn.Module]) -> None:
        """Set the attributes on the parameters that the optimizer is given, and register the hooks
        on those that a unit gathers, whose gradient is a rank's whole gradient."""
        for name, parameter in module.named_parameters():
            attached.set_attributes(parameter, self._attributes.get(name, {}))
        held = wrap_units.held(module, {*units} - {module}, module, "")
        for name, parameter, unit in held:
            if name in self._hooks and isinstance(parameter, DTensor):
                _register_when_gathered(module, name, unit, self._hooks[name])


def _register_when_gathered(
    module: nn.Module, name: str, unit: nn.Module, hooks: Sequence[attached.Hook]
) -> None:
    owner, _, key = name.rpartition(".")
    part = module.get_submodule(owner)
    known: set[int] = set()

    def register(unit: nn.Module, args: Any) -> None:
        gathered: Tensor | None = part._parameters[key]  # FSDP makes it once
        if gathered is not None and id(gathered) not in known and gathered.requires_grad:
            known.add(id(gathered))
            for hook in hooks:
                gathered.register_hook(hook)  # type: ignore[no-untyped-call]

    unit.register_forward_pre_hook(register)


def watched_writes(
    module: nn.Module, units: Sequence[nn.Module], plan: Plan, world: World
) -> Writes:
    """Watch the weights of sharded units for writes in a forward."""
    begin = _watch_gathered(module, units)
    return Writes("fsdp and mesh", module, begin, plan.compile, world.size)


def _watch_gathered(
    module: nn.Module, units: Sequence[nn.Module]
) -> Callable[[Writes], Callable[[], None]]:
    """Return a `begin` for `Writes` that watches each weight when its unit is gathered: a write to
    a gathered weight is lost. A write to the shard that this rank keeps is not."""
    kept = {id(parameter) for parameter in module.parameters()}
    places: dict[nn.Module, list[tuple[str, nn.Module, str]]] = {unit: [] for unit in units}
    for name, _, unit in wrap_units.held(module, {*units} - {module}, module, ""):
        owner, _, key = name.rpartition(".")
        places[unit].append((name, module.get_submodule(owner), key))

    def gathered(unit: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, part, key in places[unit]:
            parameter = part._parameters[key]
            if parameter is not None and id(parameter) not in kept:
                yield name, parameter

    def begin(writes: Writes) -> Callable[[], None]:
        def watch(unit: nn.Module, args: Any) -> None:
            for name, parameter in gathered(unit):
                writes.watch(name, parameter)

        def look_again(unit: nn.Module, args: Any, output: Any) -> None:
            for _, parameter in gathered(unit):
                writes.before_freed(parameter)

        handles = [unit.register_forward_pre_hook(watch) for unit in places]
        # before FSDP's own hook, which frees them
        handles += [unit.register_forward_hook(look_again, prepend=True) for unit in places]

        def end() -> None:
            for handle in handles:
                handle.remove()

        return end

    return begin

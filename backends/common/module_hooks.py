"""Backward hooks of modules that change gradients.

A rank calls such a hook with the gradients of its own samples, which are larger by the number of
ranks. A hook that changes each sample's gradients by a linear function gives the result of one
process; any other is refused by name. In one process a hook need not be linear. A hook that only
looks at gradients is never tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ...kernel.contract import World
from ...kernel.errors import RecipeError
from ...kernel.plan import Plan
from .attached import NOT_LINEAR, describe_hook, sums_parts
from .compiled import eagerly, has_compiled
from .models import NO_CONTEXT
from .tried_gradients import Like, acts_by_rows, is_linear

__all__ = ["ModuleHooks"]

_LIBRARIES = ("torch.", "deepspeed", __package__.rpartition(".")[0])
_Table = MutableMapping[int, Any]
_Gradients = Any
"""A tuple of gradients, with None for inputs and outputs that have none."""
_OF_SEVERAL = (
    "it computes with several samples at once: a row of what it returns depends on other rows "
    "(dimension 0) of what it is given"
)


class ModuleHooks:
    """Watches the backward hooks of a module and its parts. They are looked for in updates 1, 2, 4,
    8 and so on; each is tried once, when it first changes a gradient. If there are any, what is
    compiled runs eagerly in these updates."""

    def __init__(self, module: nn.Module, plan: Plan, world: World) -> None:
        self._module = module
        self._in_one_process = world.size == 1 and not plan.precision.loss_scaling
        self._watches = not self._in_one_process or sums_parts(plan, world)
        self._compiles = plan.compile
        self._tables: list[_Table] = []
        self._tried: dict[tuple[int, int], Any] = {}
        """The hooks that were tried, by the ids of the hook and its module."""
        self._refusal: RecipeError | None = None
        self._updates, self._update_begins = 0, True

    def watching(self, last: bool) -> AbstractContextManager[None]:
        """Enclose a microbatch; `last`: of its update. Raises `RecipeError`, naming the hook, if
        one is not exact."""
        if not self._watches:
            return NO_CONTEXT
        if self._update_begins:
            self._updates += 1
            if not self._updates & (self._updates - 1):
                self._tables = [table for table in _tables(self._module) if table]
        self._update_begins = last
        return self._watching() if self._tables else NO_CONTEXT

    @contextmanager
    def _watching(self) -> Iterator[None]:
        replaced = []
        for table in self._tables:
            for key, hook in table.items():
                if not str(getattr(hook, "__module__", "")).startswith(_LIBRARIES):
                    table[key] = watched = self._watched(hook)
                    replaced.append((table, key, hook, watched))
        compiles = replaced and (self._compiles or has_compiled(self._module))
        try:
            with eagerly() if compiles else NO_CONTEXT:
                yield
        finally:
            for table, key, hook, watched in replaced:
                if table.get(key) is watched:  # the hook was not removed
                    table[key] = hook
            refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal

    def _watched(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that does the same, and tries `hook` when it has changed a gradient."""

        def call(module: nn.Module, *gradients: _Gradients) -> Any:
            key = id(hook), id(module)
            if key in self._tried:
                return hook(module, *gradients)
            before = [each._version for each in _tensors(gradients[:1])]
            made = hook(module, *gradients)
            if made is not None or before != [each._version for each in _tensors(gradients[:1])]:
                self._tried[key] = hook
                self._try(hook, module, gradients)
            return made

        return call

    def _try(self, hook: Callable[..., Any], module: nn.Module, gradients: Any) -> None:
        """Try a hook on gradients like these; keep the refusal until the backward has ended."""

        def change(drawn: Sequence[Tensor]) -> Sequence[Tensor]:
            left = iter(drawn)
            given = tuple(
                tuple(next(left) if isinstance(each, Tensor) else each for each in of_kind)
                for of_kind in gradients
            )
            made = hook(module, *given)
            return _tensors([given[0] if made is None else made])

        try:
            why = self._why_inexact(change, [Like.of(each) for each in _tensors(gradients)])
        except Exception as error:  # the user's code, on gradients that it may not expect
            why = f"it cannot be tried on gradients ({type(error).__name__}: {error})"
        if why and self._refusal is None:
            names = (name for name, part in self._module.named_modules() if part is module)
            self._refusal = RecipeError(
                f"{describe_hook(hook)} is registered on module {next(names, '')!r} as a backward "
                f"hook, and {why}. Each rank calls it with the gradients of its own microbatch, "
                "which are larger by the number of ranks, so it would train on other numbers than "
                "one process. A hook may scale or mask gradients. To clip, set max_grad_norm or "
                "max_grad_value; or train in one process (backend cpu) with micro_batch equal to "
                "global_batch"
            )

    def _why_inexact(self, change: Callable[..., Any], likes: Sequence[Like]) -> str:
        """Return why a change of gradients is not exact; an empty string if it is."""
        numbers = {like.shape[:1] for like in likes}
        in_rows = len(numbers) == 1 and all(number > (1,) for number in numbers)
        if not (self._in_one_process and in_rows) and not is_linear(change, likes):
            return NOT_LINEAR
        if in_rows and not acts_by_rows(change, likes):
            return _OF_SEVERAL
        return ""


def _tables(module: nn.Module) -> Iterator[_Table]:
    """Yield the backward hooks of all modules in general, and of each part of this one."""
    yield torch_module._global_backward_pre_hooks
    yield torch_module._global_backward_hooks
    for part in module.modules():
        yield part._backward_pre_hooks
        yield part._backward_hooks


def _tensors(gradients: Sequence[_Gradients]) -> list[Tensor]:
    found = []
    for each in gradients:
        found += [each] if isinstance(each, Tensor) else [e for e in each if e is not None]
    return found

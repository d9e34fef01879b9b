"""Writes to weights in a forward, which drivers that gather or copy weights would drop.

A weight that is written to counts it in its version, except by way of `weight.data`. That is seen
by giving the weight another class for a while. Nothing is computed, and no device is waited for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...kernel.errors import RecipeError

__all__ = ["Writes", "each_of", "refuse_renormalising"]

_LIBRARIES = ("deepspeed", "torch.distributed", "torch.autograd", "torch.nn.parallel", __package__)


def each_of(module: nn.Module) -> Callable[[Callable[[str, Tensor], None]], Callable[[], None]]:
    """Return a `begin` for `Writes` that watches all parameters."""

    def begin(watch: Callable[[str, Tensor], None]) -> Callable[[], None]:
        for name, parameter in module.named_parameters():
            watch(name, parameter)
        return lambda: None

    return begin


def refuse_renormalising(module: nn.Module, num_ranks: int) -> None:
    """Raise `RecipeError` for an embedding that writes to its weight in each forward (`max_norm`),
    by what its rank's batch has looked up."""
    for name, part in module.named_modules() if num_ranks > 1 else ():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            raise RecipeError(
                f"{name or 'the model'} is an embedding with max_norm={part.max_norm}: each "
                "forward writes to its weight the rows that it looks up, which are others on each "
                "rank. Leave max_norm out and divide by the norm in the forward "
                "(torch.nn.functional.normalize), or train in one process (backend cpu)"
            )


class Writes:
    """Watches weights in the first update, and whenever their number has doubled.

    `begin(watch)` starts to watch: it calls `watch(name, parameter)` itself, or has it called as
    weights are gathered, and returns what undoes that. Nothing is watched in what is compiled.
    Raises `RecipeError` for what `refuse_renormalising` refuses.
    """

    def __init__(
        self,
        driver: str,
        module: nn.Module,
        begin: Callable[[Callable[[str, Tensor], None]], Callable[[], None]],
        compiled: bool,
        num_ranks: int,
    ) -> None:
        refuse_renormalising(module, num_ranks)
        self._driver, self._module, self._begin = driver, module, begin
        self._compiled, self._updates = compiled, 0
        self._watched: dict[int, tuple[str, Any, int]] = {}
        self._found: dict[str, None] = {}

    def updated(self) -> None:
        """Count an update."""
        self._updates += 1

    def watching(self) -> AbstractContextManager[None]:
        """Enclose a microbatch. Raises `RecipeError`, naming the weights that were written to."""
        due = not (self._updates + 1) & self._updates
        if due and not self._compiled and not any(map(_is_compiled, self._module.modules())):
            return self._watching()
        return nullcontext()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        end = self._begin(self._watch)
        try:
            yield
        finally:
            end()
            found = self._end()
        if found:
            raise RecipeError(
                f"{', '.join(found[:10])}: these weights were written to in a forward or in "
                f"recipe.loss, which is lost on {self._driver}: a rank computes with a copy of "
                "what it holds. Change weights in Recipe.after_update (averages of a teacher, "
                "clipping, projections; compat: Trainer.after_update), and keep what a forward "
                "counts in buffers"
            )

    def _watch(self, name: str, parameter: Tensor) -> None:
        if id(parameter) in self._watched:
            return
        self._watched[id(parameter)] = name, parameter, parameter._version
        if type(parameter) is nn.Parameter:
            watched: Any = parameter
            watched.__class__ = _Watched
            watched._note_write = lambda: self._found.setdefault(name)

    def _end(self) -> list[str]:
        for name, parameter, version in self._watched.values():
            if type(parameter) is _Watched:
                plain: Any = parameter
                plain.__class__ = nn.Parameter
                del plain._note_write
            if parameter._version != version:
                self._found.setdefault(name)
        self._watched.clear()
        found, self._found = list(self._found), {}
        return found


def _is_compiled(part: nn.Module) -> bool:
    """True for a module that the recipe compiles, which would be compiled again."""
    return getattr(part, "_compiled_call_impl", None) is not None or hasattr(part, "_orig_mod")


class _Watched(nn.Parameter):
    """A parameter whose `data` notes who writes to it."""

    _note_write: Callable[[], object]

    @property
    def data(self) -> Tensor:
        found: Tensor = _DATA.__get__(self)
        if _is_library(sys._getframe(1)):
            return found
        shown = found.as_subclass(_Data)
        shown._note_write = self._note_write
        return shown

    @data.setter
    def data(self, value: Tensor) -> None:
        if not _is_library(sys._getframe(1)):
            self._note_write()
        _DATA.__set__(self, _plain(value))


class _Data(Tensor):
    """The elements of a parameter, as `weight.data` gives them."""

    _note_write: Callable[[], object]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            name = getattr(function, "__name__", "")
            written = args[:1] if _writes(name) else ()
            for target in (*written, kwargs.get("out")):
                for each in target if isinstance(target, (list, tuple)) else (target,):
                    if isinstance(each, _Data) and hasattr(each, "_note_write"):
                        each._note_write()
            made = function(*args, **kwargs)
        first = next((a for a in args if isinstance(a, _Data) and hasattr(a, "_note_write")), None)
        if first is not None and _is_view(made, first):
            made = made.as_subclass(_Data)  # what is written to it is written to the parameter
            made._note_write = first._note_write
        return made


def _is_view(made: Any, of: Tensor) -> bool:
    return (
        type(made) is Tensor
        and made._base is not None
        and made.untyped_storage()._cdata == of.untyped_storage()._cdata
    )


_DATA: Any = Tensor.data
_IN_PLACE = {"__setitem__"} | {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}
_NO_WRITES = {"requires_grad_", "detach_", "share_memory_", "retain_grad_"}


def _writes(name: str) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return name in _IN_PLACE or (in_place and name not in _NO_WRITES)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor) if isinstance(tensor, _Data) else tensor


def _is_library(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(_LIBRARIES)

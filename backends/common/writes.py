"""Writes to weights in a forward, which drivers that gather or copy weights would drop.

A weight that is written to counts it in its version, except by way of `weight.data`, for which see
`noting_data`. Nothing is computed, and no device is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...kernel.errors import RecipeError
from .data_writes import DataWrites, noting_data
from .models import NO_CONTEXT

__all__ = ["AFTER_UPDATE", "Writes", "each_of", "lost_writes", "refuse_renormalising"]

AFTER_UPDATE = "Recipe.after_update (compat: Trainer.after_update)"
"""The place for changes of weights after each update."""


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


def lost_writes(names: Sequence[str], driver: str) -> RecipeError:
    """Return the refusal of writes to these weights in a forward."""
    return RecipeError(
        f"{', '.join(names[:10])}: these weights were written to in a forward or in recipe.loss, "
        f"which is lost on {driver}: a rank computes with a copy of what it holds. Change weights "
        f"in {AFTER_UPDATE}: averages of a teacher, clipping, projections. Keep what a forward "
        "counts in buffers"
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
        self._watched: dict[int, tuple[str, Tensor, int]] = {}
        self._data: DataWrites | None = None
        self._found: dict[str, None] = {}

    def updated(self) -> None:
        """Count an update."""
        self._updates += 1

    def watching(
        self, inside: AbstractContextManager[Any] = NO_CONTEXT
    ) -> AbstractContextManager[Any]:
        """Enclose a microbatch, and enter `inside`. Raises `RecipeError`, naming the weights that
        were written to."""
        due = not (self._updates + 1) & self._updates
        if due and not self._compiled and not any(map(_is_compiled, self._module.modules())):
            return self._watching(inside)
        return inside

    @contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Within the block user's code may write to weights: it is no forward."""
        self._compare()
        try:
            yield
        finally:
            kept = dict(self._found)
            self._compare()
            self._found = kept

    @contextmanager
    def _watching(self, inside: AbstractContextManager[Any]) -> Iterator[None]:
        end = self._begin(self._watch)
        try:
            with noting_data() as self._data, noting_data(DTensor), inside:
                yield
        finally:
            end()
            self._compare()
            found, self._found, self._data = list(self._found), {}, None
            self._watched.clear()
        if found:
            raise lost_writes(found, self._driver)

    def _watch(self, name: str, parameter: Tensor) -> None:
        self._watched.setdefault(id(parameter), (name, parameter, parameter._version))

    def _compare(self) -> None:
        """Note which weights were written to, and compare with their present state from now on."""
        if self._data is None:
            return
        written = self._data.take()
        for key, (name, parameter, version) in self._watched.items():
            if key in written or parameter._version != version:
                self._found.setdefault(name)
                self._watched[key] = name, parameter, parameter._version


def _is_compiled(part: nn.Module) -> bool:
    """True for a module that the recipe compiles, which would be compiled again."""
    return getattr(part, "_compiled_call_impl", None) is not None or hasattr(part, "_orig_mod")

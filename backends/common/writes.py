"""Writes to weights in a forward, which drivers that gather or copy weights would drop.

A weight that is written to counts it in its version, except by way of `weight.data`, for which see
`noting_data`. Nothing is computed, and no device is waited for. Compiled code counts nothing: there
the bits of weights are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...kernel.errors import RecipeError
from .compiled import eagerly, has_compiled
from .data_writes import DataWrites, noting_data
from .digests import digests_of
from .models import NO_CONTEXT

__all__ = ["AFTER_UPDATE", "Writes", "each_of", "lost_writes", "refuse_renormalising"]

AFTER_UPDATE = "Recipe.after_update (compat: Trainer.after_update)"
"""The place for changes of weights after each update."""


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

    `begin(writes)` starts to watch: it calls `writes.watch(name, parameter)` itself, or has it
    called as weights are gathered, and `writes.before_freed(parameter)` before they are freed; it
    returns what undoes that. None: each write lasts. `compiled`: the driver compiles the model.
    What the recipe compiles runs eagerly while it is watched. Raises `RecipeError` for what
    `refuse_renormalising` refuses.
    """

    def __init__(
        self,
        driver: str,
        module: nn.Module,
        begin: Callable[[Writes], Callable[[], None]] | None,
        compiled: bool,
        num_ranks: int,
    ) -> None:
        refuse_renormalising(module, num_ranks)
        self._driver, self._module, self._begin = driver, module, begin
        self._compiled, self._updates = compiled, 0
        self._watched: dict[int, tuple[str, Tensor, int]] = {}
        self._digests: dict[int, Tensor] = {}
        """Digests of weights that compiled code may write to, by their ids."""
        self._changes: list[tuple[str, Tensor]] = []
        """Name of each weight that was freed, and whether its bits had changed."""
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
        if self._begin is None or (self._updates + 1) & self._updates:
            return inside
        return self._watching(inside, self._begin)

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
    def _watching(
        self, inside: AbstractContextManager[Any], begin: Callable[[Writes], Callable[[], None]]
    ) -> Iterator[None]:
        compiles = not self._compiled and has_compiled(self._module)
        stance = eagerly() if compiles else NO_CONTEXT
        end = begin(self)
        try:
            with stance, noting_data() as self._data, noting_data(DTensor), inside:
                yield
            self._compare()
            found = list(self._found)
        finally:
            end()
            self._found, self._changes, self._data = {}, [], None
            self._watched.clear()
            self._digests.clear()
        if found:
            raise lost_writes(found, self._driver)

    def watch(self, name: str, parameter: Tensor) -> None:
        """Compare this parameter with its present state from now on."""
        self._watched.setdefault(id(parameter), (name, parameter, parameter._version))
        if self._compiled and id(parameter) not in self._digests:
            self._digests[id(parameter)] = _digest(parameter)

    def before_freed(self, parameter: Tensor) -> None:
        """Compare this parameter for the last time."""
        if (before := self._digests.pop(id(parameter), None)) is not None:
            name, *_ = self._watched[id(parameter)]
            self._changes.append((name, _digest(parameter) != before))

    def _compare(self) -> None:
        """Note which weights were written to, and compare with their present state from now on."""
        if self._data is None:
            return
        written = self._data.take()
        for key, (name, parameter, version) in self._watched.items():
            if key in self._digests:
                self.before_freed(parameter)
                self._digests[key] = _digest(parameter)
            if key in written or parameter._version != version:
                self._found.setdefault(name)
                self._watched[key] = name, parameter, parameter._version
        changes, self._changes = self._changes, []
        if changes:
            are_written = torch.stack([changed for _, changed in changes]).tolist()
            for (name, _), is_written in zip(changes, are_written, strict=True):
                if is_written:
                    self._found.setdefault(name)


def each_of(module: nn.Module) -> Callable[[Writes], Callable[[], None]]:
    """Return a `begin` for `Writes` that watches all parameters."""

    def begin(writes: Writes) -> Callable[[], None]:
        for name, parameter in module.named_parameters():
            writes.watch(name, parameter)
        return lambda: None

    return begin


def _digest(parameter: Tensor) -> Tensor:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return digests_of([local])[0]

"""`Recipe.after_update`: changes of weights, element by element, after each applied update."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..kernel.contract import Engine
from ..kernel.errors import CapabilityRefused, RecipeError
from ..kernel.loop import TrainLoop
from ..kernel.optional import ChangesWeights
from ..kernel.plan import Parts
from ..kernel.recipe import Recipe

__all__ = ["AfterUpdate", "ChangesWeights", "Parts"]

_MOST_TRIED = 64
"""Elements of a weight on which a change is repeated."""

_REMEDY = (
    "it must change each element by itself, from elements at the same place in weights that are "
    "sharded alike, since a rank may hold a part of them"
)


class AfterUpdate:
    """The recipe's changes of weights, if it has any. `run` is called by all ranks."""

    def __init__(self, recipe: Recipe, engine: Engine, driver: str) -> None:
        self._change, self._done = recipe.after_update, 0
        self._tried = False
        self._engine: ChangesWeights | None = None
        if self._change is not None:
            if not isinstance(engine, ChangesWeights):
                raise CapabilityRefused(
                    "recipe.after_update",
                    driver,
                    "it changes no weights between updates; take another driver",
                )
            self._engine = engine

    @property
    def changes(self) -> bool:
        """True if the recipe changes weights besides the optimizer."""
        return self._engine is not None

    def run(self, loop: TrainLoop) -> None:
        """Change the weights after an update that was applied."""
        if self._engine is None:
            return
        loop.resolve_pending_outcome()
        number = loop.progress.applied
        if number != self._done:
            self._done = number
            due = not self._tried or number & (number - 1) == 0
            self._tried = True
            self._engine.change_weights(lambda parts: self._apply(parts, number, due))

    def restored(self, loop: TrainLoop) -> None:
        """Note that the loop resumed from a checkpoint, whose weights are already changed."""
        self._done = loop.progress.applied

    @torch.no_grad()
    def _apply(self, parts: Parts, number: int, due: bool) -> None:
        weights = {name: tensor for name, (tensor, _) in parts.items()}
        # a view if possible
        flat = {name: tensor.reshape(-1) for name, tensor in weights.items()}
        tried = self._try(flat, parts, number) if due else {}
        self._call(flat, number)
        for name, tensor in weights.items():
            if flat[name].data_ptr() != tensor.data_ptr():
                tensor.copy_(flat[name].view(tensor.shape))
        for name, expected in tried.items():
            _require_same(name, flat[name][_tried(flat[name])], expected)

    def _try(self, flat: Mapping[str, Tensor], parts: Parts, number: int) -> dict[str, Tensor]:
        """Return some elements of each weight after the change, computed from these elements
        alone."""
        some = {}
        for name, tensor in flat.items():
            some[name] = tensor[_tried(tensor)].clone().as_subclass(_Elements)
            some[name].known = (name, parts[name][1])
        self._call(some, number)
        return {name: tensor.as_subclass(Tensor) for name, tensor in some.items()}

    def _call(self, weights: Mapping[str, Tensor], number: int) -> None:
        assert self._change is not None
        made = self._change(MappingProxyType(_LocalWeights(weights)), number)
        if made is not None:
            raise RecipeError(
                f"recipe.after_update returned {type(made).__name__}; it must return None, and "
                "change the weights in place, as by weight.clamp_(-1, 1)"
            )


def _tried(flat: Tensor) -> slice:
    """Select elements in the middle of a weight, at most half of it."""
    size = min(_MOST_TRIED, (len(flat) + 1) // 2)
    start = (len(flat) - size + 1) // 2
    return slice(start, start + size)


class _LocalWeights(dict[str, Tensor]):
    """The weights that this rank holds, by FQN; another name raises an error that lists them."""

    def __missing__(self, name: str) -> Tensor:
        raise RecipeError(
            f"recipe.after_update asks for the weight {name!r}, which this rank does not hold. "
            f"There are {', '.join([*self][:10])}; of tied weights the first name counts, and "
            "with backend.pipeline only those of this rank's stages are there"
        )


class _Elements(Tensor):
    """Elements of a weight, or values computed from them; refuses operations that are not
    elementwise."""

    known: tuple[str, Hashable]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        made = super().__torch_function__(  # type: ignore[no-untyped-call]
            function, types, args, kwargs or {}
        )
        name = getattr(function, "__name__", str(function))
        if name in ("__get__", "__set__", "size", "dim", "__len__", "numel", "__repr__"):
            return made
        several = [arg for arg in args if isinstance(arg, (list, tuple))]
        if name.startswith("_foreach") and several:
            results = made if isinstance(made, (list, tuple)) else [None] * len(several[0])
            for together in zip(*several, results, strict=False):
                _note(name, [*together[:-1], *args], together[-1])
        else:
            _note(name, [*args, *(kwargs or {}).values()], made)
        return made


def _note(function: str, args: Sequence[Any], made: Any) -> None:
    given = [arg for arg in args if isinstance(arg, _Elements) and hasattr(arg, "known")]
    if not given:
        return
    (first, held), *others = [arg.known for arg in given]
    for second, other in others:
        if other != held:
            raise RecipeError(
                f"recipe.after_update gives {function} the weights {first!r} and {second!r}, of "
                f"which this rank holds other elements ({held} and {other}); {_REMEDY}"
            )
    if made is None:
        return
    if not isinstance(made, _Elements) or made.shape != given[0].shape:
        raise RecipeError(
            f"recipe.after_update takes {function} of the weight {first!r}, which makes "
            f"{_describe(made)} of its elements together; {_REMEDY}"
        )
    if not hasattr(made, "known"):
        made.known = (first, held)


def _describe(made: Any) -> str:
    return f"a tensor of shape {tuple(made.shape)}" if isinstance(made, Tensor) else repr(made)


def _require_same(name: str, found: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if found.element_size() >= 4 else 1e-2
    if not torch.allclose(found, expected, rtol=tolerance, atol=1e-30, equal_nan=True):
        raise RecipeError(
            f"recipe.after_update changes the weight {name!r} in another way when it is given a "
            f"part of its elements, or called again; {_REMEDY}, without random numbers, and keep "
            "nothing between calls: use the number of the update"
        )

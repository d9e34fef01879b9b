"""Notes on samples that a collate function left out, and on updates without items."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..data.open_dataset import Source
from ..kernel.batches import Group
from ..kernel.recipe import Recipe

__all__ = ["LeftOut"]


class LeftOut:
    """Says once what is missing, and once for each evaluation set. Called by all ranks with the
    same numbers. `note` passes a message on."""

    def __init__(self, recipe: Recipe, source: Source, note: Callable[[str], None]) -> None:
        self._source, self._note = source, note
        self._counts_samples = recipe.count_items is None
        self._said: set[str] = set()

    def ended(self, step: int, group: Group, items: float) -> None:
        """Note the items of a step's global batch. Called where they are fewer than samples."""
        if not items:
            self._say(
                "no items",
                f"step {step} had no items: {self._where(group)}. Its gradients were zero, and the "
                "means of the log leave it out; the optimizer may have moved weights by its "
                "momentum and weight decay",
            )
        elif self._counts_samples:
            missing = group.num_samples - items
            self._say(
                "training",
                f"recipe.collate left out {missing:.0f} of the {group.num_samples} samples of step "
                f"{step}: {self._where(group)}. {_COUNTED}",
            )

    def evaluated(self, name: str, sums: Mapping[str, Any]) -> None:
        """Note the sums of an evaluation over one set."""
        items, samples = float(sums["items"]), float(sums["samples"])
        if self._counts_samples and items < samples:
            self._say(
                f"evaluation {name}",
                f"recipe.collate left out {samples - items:.0f} of the {samples:.0f} samples of "
                f"the evaluation set {name!r}. {_COUNTED}",
            )

    def _where(self, group: Group) -> str:
        return self._source.where(group.position, group.num_samples)

    def _say(self, what: str, words: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._note(words)


_COUNTED = (
    "Means are over the rows that its batches hold, the first dimension of their tensors. If that "
    "dimension is no sample, or items are something else, give Recipe(count_items=...)"
)

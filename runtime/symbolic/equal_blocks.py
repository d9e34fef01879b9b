"""Finds a model's equal blocks, so that a step is run with a few of them in place of all."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

import torch
from torch import nn

from ..data.nested import map_tensors, tensors_of
from ..kernel.recipe import Batch, Recipe
from ..trainer.recipe_checks import without_memory
from ..trainer.settings import Settings
from .fake_world import fake_tensors, undisturbed
from .first_batch import first_batch
from .modes import Mode
from .trace import added_part

__all__ = ["SHORT", "EqualBlocks", "find_equal_blocks"]

SHORT = (3, 4)
"""Depths of the models that are run: the first one has a block that is neither first nor last."""
_LEAST = 10
"""Models with fewer blocks are run as they are, which is not slower."""
_ONE_SAMPLE = Settings(steps=1, global_batch=1)
_NUMBER = re.compile(r"[0-9?[]")
"""Part of a pattern (`fnmatch`) that can match some numbers and not others."""


@dataclass(frozen=True)
class EqualBlocks:
    """A model with a sequence of `depth` equal blocks."""

    recipe: Recipe
    depth: int
    names: tuple[tuple[str, ...], ...]
    """For each part of a block: its names in all blocks."""
    renamed: tuple[str, ...]
    """Names of parts that follow in the same list, and have other names in a shorter one."""

    def shortened(self, depth: int) -> Recipe:
        """Return the recipe of a model with so many of these blocks."""
        return dataclasses.replace(self.recipe, model=lambda: _shortened(self.recipe, depth))

    def are_named_alike(self, *values: Any) -> bool:
        """Return False if a text in these nested values is a pattern of a part in some of the
        blocks, such as `blocks.7` or `blocks.1*`, or of one with another name in a shorter
        list."""
        patterns = [text for text in _texts(values) if _NUMBER.search(text)]
        return not any(
            0 < sum(fnmatchcase(name, pattern) for name in names) < len(names)
            for pattern in patterns
            for names in self.names
        ) and not any(fnmatchcase(name, pattern) for pattern in patterns for name in self.renamed)


def find_equal_blocks(recipe: Recipe) -> EqualBlocks | None:
    """Return the longest sequence of equal blocks in a list of modules.

    The blocks have the same class and parameters. The forward of the whole model runs the same
    operations for each of them, on tensors of the same shapes: it is run, without memory, on one
    sample. None if there are too few, or if the recipe takes over its steps.
    """
    updates_differ = hasattr(recipe.loss, "of_update")
    if recipe.step is not None or updates_differ or (model := without_memory(recipe)) is None:
        return None
    blocks = _named(recipe, model)
    if blocks is None or blocks.depth < _LEAST:
        return None
    try:
        batch = first_batch(recipe, _ONE_SAMPLE, 1)
        shorter, longer = (_forward(blocks.shortened(number), batch) for number in SHORT)
        added = added_part(shorter, longer)
        if added is None:
            return None
        begin, end = added
        repeated = longer[begin:end] * (blocks.depth - SHORT[0])
        expected = [*shorter[:begin], *repeated, *shorter[begin:]]
        return blocks if _forward(recipe, batch) == expected else None
    except Exception:  # whatever is wrong is found when the whole model is run
        return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif dataclasses.is_dataclass(value):
        yield from _texts([getattr(value, field.name) for field in dataclasses.fields(value)])
    elif isinstance(value, Mapping):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from _texts(each)


def _named(recipe: Recipe, model: nn.Module) -> EqualBlocks | None:
    container, first, depth = _longest(model)
    if container is None:
        return None
    path = next(name for name, each in model.named_modules() if each is container)
    prefix = path and f"{path}."
    block = container[first]
    parts = [*block.named_modules(), *block.named_parameters(), *block.named_buffers()]
    return EqualBlocks(
        recipe,
        depth,
        names=tuple(
            tuple(f"{prefix}{index}.{name}".rstrip(".") for index in range(first, first + depth))
            for name, _ in parts
        ),
        renamed=tuple(
            f"{prefix}{index}.{name}".rstrip(".")
            for index in range(first + depth, len(container))
            for name, _ in container[index].named_modules()
        ),
    )


def _shortened(recipe: Recipe, depth: int) -> nn.Module:
    model = recipe.model()
    container, first, length = _longest(model)
    assert container is not None
    del container[first + depth : first + length]
    return model


def _longest(model: nn.Module) -> tuple[Any, int, int]:
    """Return the list with the most equal blocks in sequence, the first one's index, and their
    number."""
    longest: tuple[Any, int, int] = (None, 0, 0)
    for container in model.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            first = 0
            for _, blocks in groupby(container, _signature):
                equal = [*blocks]
                if len(equal) > longest[2] and _are_separate(equal):
                    longest = (container, first, len(equal))
                first += len(equal)
    return longest


def _signature(block: nn.Module) -> Hashable:
    tensors = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    return type(block), tuple(
        (name, each.shape, each.dtype, each.requires_grad) for name, each in tensors.items()
    )


def _are_separate(blocks: list[nn.Module]) -> bool:
    """Return True if each has parameters, and shares them with no other one."""
    parameters = [{*block.parameters()} for block in blocks]
    return all(parameters) and len(set().union(*parameters)) == sum(map(len, parameters))


class _Forward(Mode):
    """Lists operations, with the shapes of their results."""

    def __init__(self) -> None:
        self.found: list[Hashable] = []

    def run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """See `Mode`."""
        result = func(*args, **kwargs)
        shapes = tuple((each.shape, each.dtype) for each in tensors_of(result))
        self.found.append((func, torch.is_grad_enabled(), shapes))
        return result


def _forward(recipe: Recipe, batch: Batch) -> list[Hashable]:
    """Return the operations of a forward in training, and its loss."""
    with undisturbed(), fake_tensors() as mode:
        model, forward = recipe.model().train(), _Forward()
        moved = map_tensors(mode.from_tensor, batch)
        with forward:
            recipe.loss(model, moved)
    return forward.found
